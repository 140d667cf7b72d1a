"""The HTTP surface, over real HTTP: granian in front, the in-memory bus and a scripted owner behind."""

from __future__ import annotations

import json

from ingress_world import WORDS, world


async def test_a_unary_chat_is_the_owners_words() -> None:
    async with world() as w:
        response = await w.chat()
        assert response.status_code == 200
        body = response.json()
        assert body["choices"][0]["message"] == {"role": "assistant", "content": "".join(WORDS), "refusal": None}
        assert body["usage"]["total_tokens"] == 11 + len(WORDS)
