"""llama.cpp's own loop over `llama_decode`, without sampling, in an environment of its own.

See `millstream.bench.peers`.

Arguments: the GGUF file, threads, the most streams, the longest context.
"""

import json
import sys
import time

import llama_cpp as lib

PATH, THREADS, STREAMS, CONTEXT = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
BATCH = 2048


def opened():
    """A model and a context with room for all streams."""
    lib.llama_log_set(_silent, None)
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(PATH.encode(), lib.llama_model_default_params())
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_seq_max = STREAMS * CONTEXT, STREAMS
    params.n_batch, params.n_ubatch = BATCH, 512
    params.n_threads = params.n_threads_batch = THREADS
    return model, lib.llama_init_from_model(model, params)


@lib.llama_log_callback
def _silent(level, text, user):
    pass


def decode(context, batch, items):
    """One call; items: (stream, position, whether logits are wanted)."""
    batch.n_tokens = len(items)
    for at, (stream, position, wanted) in enumerate(items):
        batch.token[at] = 100 + (stream * 31 + position * 7) % 200
        batch.pos[at] = position
        batch.n_seq_id[at] = 1
        batch.seq_id[at][0] = stream
        batch.logits[at] = wanted
    if lib.llama_decode(context, batch) != 0:
        raise SystemExit("llama_decode failed")


def fill(context, batch, streams, tokens):
    lib.llama_memory_clear(lib.llama_get_memory(context), True)
    for stream in range(streams):
        for begin in range(0, tokens, BATCH):
            end = min(tokens, begin + BATCH)
            decode(context, batch, [(stream, at, at == tokens - 1) for at in range(begin, end)])


def main():
    model, context = opened()
    batch = lib.llama_batch_init(BATCH, 0, 1)
    vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        ask = json.loads(line)
        if ask["what"] == "prefill":
            began = time.perf_counter()
            fill(context, batch, 1, ask["tokens"])
            lib.llama_synchronize(context)
            rate = ask["tokens"] / (time.perf_counter() - began)
        elif ask["what"] == "decode":
            fill(context, batch, ask["streams"], ask["context"])
            lib.llama_synchronize(context)
            began = time.perf_counter()
            for step in range(ask["tokens"]):
                decode(context, batch, [(stream, ask["context"] + step, True) for stream in range(ask["streams"])])
                lib.llama_synchronize(context)
            rate = ask["streams"] * ask["tokens"] / (time.perf_counter() - began)
        else:
            rate = perplexity(context, batch, ask["ids"], vocabulary)
        print(json.dumps({"value": rate}), flush=True)


def perplexity(context, batch, ids, vocabulary):
    """exp of the mean surprise of ids[1:]."""
    import numpy as np

    lib.llama_memory_clear(lib.llama_get_memory(context), True)
    total = 0.0
    for begin in range(0, len(ids), 256):
        part = ids[begin : begin + 256]
        batch.n_tokens = len(part)
        for at, token in enumerate(part):
            batch.token[at], batch.pos[at], batch.n_seq_id[at], batch.logits[at] = token, begin + at, 1, True
            batch.seq_id[at][0] = 0
        if lib.llama_decode(context, batch) != 0:
            raise SystemExit("llama_decode failed")
        rows = np.ctypeslib.as_array(lib.llama_get_logits(context), (len(part), vocabulary)).astype(np.float64)
        for at in range(len(part)):
            if begin + at + 1 < len(ids):
                row = rows[at] - rows[at].max()
                total += np.log(np.exp(row).sum()) - row[ids[begin + at + 1]]
    return float(np.exp(total / (len(ids) - 1)))


if __name__ == "__main__":
    main()
