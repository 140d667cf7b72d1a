"""One choice of a request while it runs: its tokens, its text, and when it ends. Pure."""

from __future__ import annotations

from wire.messages import ChoiceEnd, Logprob, Scored
from workers.engine.protocol import Emission, Restored, Sequence
from workers.engine.shifts import Shifts
from workers.engine.text import TextStream
from workers.engine.vocabulary import Vocabulary


class Generation:
    """A choice that hasn't ended. `ids` holds what it generated, in this engine's life or before."""

    __slots__ = (
        "_eos_ids",
        "_text",
        "choice",
        "computed",
        "ids",
        "matcher",
        "prompt_logprobs",
        "sequence",
        "shifts",
        "slot",
    )

    def __init__(self, sequence: Sequence, choice: int, vocabulary: Vocabulary) -> None:
        """Uncompilable when its grammar is."""
        restored = sequence.restored[choice] if sequence.restored else Restored(())
        self.sequence = sequence
        self.choice = choice
        self.ids = list(restored.ids)
        self.shifts = Shifts(sequence.sampling, sequence.prompt)
        for token in self.ids:
            self.shifts.take(token)
        self.slot = -1
        """where its KV is, once it runs"""
        self.computed = 0
        """tokens of prompt and choice whose KV is there"""
        self.prompt_logprobs: list[Logprob] = []
        """of the prompt's tokens but the first, as far as they are known and asked for"""
        self._eos_ids = vocabulary.eos_ids
        grammar = sequence.grammar
        self.matcher = None if grammar is None else vocabulary.grammars.start(grammar)
        """what its next token is bound by"""
        if self.matcher is not None:
            for token in self.ids:
                self.matcher.take(token)
        self._text = TextStream(
            vocabulary.token_bytes,
            sequence.stop,
            calls=grammar is not None and grammar.calls,
            unstopped=sequence.min_tokens,
        )
        self._text.push(self.ids)

    @property
    def known(self) -> int:
        """Tokens of prompt and choice that there are."""
        return len(self.sequence.prompt) + len(self.ids)

    @property
    def bars_eos(self) -> bool:
        """Whether the next token must not end the choice."""
        return self.sequence.ignore_eos or len(self.ids) < self.sequence.min_tokens

    @property
    def scores_prompt(self) -> bool:
        """Whether it is this choice that tells how likely the prompt was: with its first token, and only once."""
        return self.sequence.prompt_logprobs is not None and self.choice == 0 and not self.ids

    def score(self, start: int, logprobs: list[Logprob]) -> None:
        """Logprobs of the prompt's tokens after position `start`."""
        self.prompt_logprobs[start:] = logprobs

    def complete(self) -> Emission | None:
        """The ending of a restored choice that has all its tokens; None if it is to be run."""
        end = self._end()
        return None if end is None else self._emission(len(self.ids), (), self._text.finish(), None, end)

    def take(self, token: int, logprob: Logprob | None) -> Emission:
        """Go on by the token that was drawn."""
        first = len(self.ids)
        prompt = Scored(self.sequence.prompt, tuple(self.prompt_logprobs)) if self.scores_prompt else None
        if token in self._eos_ids:
            return self._emission(first, (), self._text.finish(), None, self._own_end(), prompt)
        self.ids.append(token)
        self.shifts.take(token)
        text = self._text.push((token,))
        if self.matcher is not None:
            self.matcher.take(token)
        end = self._end()
        if end is not None:
            text += self._text.finish()
        return self._emission(first, (token,), text, logprob, end, prompt)

    def fail(self, why: str) -> Emission:
        """Give the request up."""
        return Emission(self.sequence.key, self.choice, len(self.ids), (), "", error=why)

    def _own_end(self) -> ChoiceEnd:
        """How it ends where the model ends it, or its grammar lets nothing follow."""
        return "tool_calls" if self._text.calling else "stop"

    def _end(self) -> ChoiceEnd | None:
        if self._text.stopped:
            return "stop"
        if self.matcher is not None and self.matcher.ended:
            return self._own_end()
        return "length" if len(self.ids) >= self.sequence.max_tokens else None

    def _emission(
        self,
        first: int,
        ids: tuple[int, ...],
        text: str,
        logprob: Logprob | None,
        end: ChoiceEnd | None,
        prompt: Scored | None = None,
    ) -> Emission:
        logprobs = None
        if self.sequence.logprobs is not None:
            logprobs = () if logprob is None else (logprob,)
        return Emission(self.sequence.key, self.choice, first, ids, text, logprobs, end, prompt=prompt)


def open_generations(sequence: Sequence, vocabulary: Vocabulary) -> list[Generation]:
    """The choices of a request that have yet to run."""
    return [
        Generation(sequence, choice, vocabulary)
        for choice in range(sequence.n)
        if not sequence.restored or sequence.restored[choice].end is None
    ]


def joined(before: Emission, after: Emission) -> Emission:
    """Two emissions of one choice that follow each other, as one."""
    logprobs = None if before.logprobs is None else before.logprobs + (after.logprobs or ())
    return Emission(
        before.key,
        before.choice,
        before.first,
        before.ids + after.ids,
        before.text + after.text,
        logprobs,
        after.end,
        after.error,
        prompt=before.prompt,
    )
