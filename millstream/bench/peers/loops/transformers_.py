"""transformers' own generate; run by its environment's Python. See `millstream.bench.peers`.

Arguments: the model's directory, threads.
"""

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM

PATH, THREADS = sys.argv[1], int(sys.argv[2])


def generate(model, streams, context, tokens):
    """Seconds."""
    ids = torch.tensor([[100 + (stream * 31 + at * 7) % 200 for at in range(context)] for stream in range(streams)])
    began = time.perf_counter()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return time.perf_counter() - began


def main():
    torch.set_num_threads(THREADS)
    model = AutoModelForCausalLM.from_pretrained(PATH, dtype=torch.float32)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        ask = json.loads(line)
        if ask["what"] == "prefill":
            value = ask["tokens"] / generate(model, 1, ask["tokens"], 1)
        elif ask["what"] == "decode":
            first = generate(model, ask["streams"], ask["context"], 1)
            whole = generate(model, ask["streams"], ask["context"], ask["tokens"])
            value = ask["streams"] * (ask["tokens"] - 1) / (whole - first)
        else:
            ids = torch.tensor([ask["ids"]])
            with torch.inference_mode():
                value = float(model(ids, labels=ids).loss.exp())
        print(json.dumps({"value": value}), flush=True)


if __name__ == "__main__":
    main()
