"""vLLM's engine on the CPU, by its own step loop; run by its environment's Python. See `millstream.bench.peers`.

Arguments: a directory with the model's weights and nothing else, threads, the most streams, the longest context.
"""

import itertools
import json
import math
import os
import sys
import time

PATH, THREADS, STREAMS, CONTEXT = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="3",
    VLLM_CPU_OMP_THREADS_BIND=f"0-{THREADS - 1}",
    VLLM_LOGGING_LEVEL="ERROR",
)

from vllm import LLM, SamplingParams  # noqa: E402

numbers = itertools.count()


def opened():
    # float32: without instructions for bf16 that is about twice as fast here
    return LLM(
        model=PATH,
        dtype="float32",
        max_num_seqs=STREAMS,
        max_model_len=CONTEXT,
        enable_prefix_caching=False,
        disable_log_stats=True,
        seed=0,
    ).llm_engine


def add(engine, ids, **params):
    chosen = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, **params)
    engine.add_request(str(next(numbers)), {"prompt_token_ids": ids}, chosen)


def run(engine, streams, context, tokens):
    """Seconds until every stream has its first token, from there to the end, and tokens in the latter time."""
    began, first, got, counts = time.perf_counter(), None, 0, {}
    for stream in range(streams):
        add(engine, [100 + (stream * 31 + at * 7) % 200 for at in range(context)], max_tokens=tokens)
    while engine.has_unfinished_requests():
        for output in engine.step():
            counts[output.request_id] = len(output.outputs[0].token_ids)
        if first is None and len(counts) == streams:
            first, got = time.perf_counter(), sum(counts.values())
    ended = time.perf_counter()
    return first - began, ended - first, streams * tokens - got


def perplexity(engine, ids):
    add(engine, list(ids), max_tokens=1, prompt_logprobs=0)
    while engine.has_unfinished_requests():
        outputs = engine.step()
    found = outputs[0].prompt_logprobs[1:]
    return math.exp(-sum(at[token].logprob for at, token in zip(found, ids[1:], strict=False)) / len(found))


def main():
    engine = opened()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        ask = json.loads(line)
        if ask["what"] == "prefill":
            value = ask["tokens"] / run(engine, 1, ask["tokens"], 1)[0]
        elif ask["what"] == "decode":
            _, seconds, tokens = run(engine, ask["streams"], ask["context"], ask["tokens"])
            value = tokens / seconds
        else:
            value = perplexity(engine, ask["ids"])
        print(json.dumps({"value": value}), flush=True)


if __name__ == "__main__":
    main()
