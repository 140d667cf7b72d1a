"""OpenVINO GenAI's continuous batching; run by its environment's Python. See `millstream.bench.peers`.

Arguments: the converted model's directory, threads, the most streams.
"""

import json
import sys
import time

import numpy as np
import openvino as ov
import openvino_genai as genai

PATH, THREADS, STREAMS = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])


def opened():
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 3
    scheduler.max_num_seqs = STREAMS
    scheduler.max_num_batched_tokens = 4096
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = False
    return genai.ContinuousBatchingPipeline(PATH, scheduler, "CPU", {"INFERENCE_NUM_THREADS": THREADS})


def prompt(stream, tokens):
    return ov.Tensor(np.array([[100 + (stream * 31 + at * 7) % 200 for at in range(tokens)]], dtype=np.int64))


def config(tokens):
    chosen = genai.GenerationConfig()
    chosen.max_new_tokens = tokens
    chosen.min_new_tokens = tokens
    chosen.ignore_eos = True
    chosen.do_sample = False
    return chosen


def run(pipe, streams, context, tokens):
    """Seconds until every stream has its first token, and from there to the end."""
    began = time.perf_counter()
    for stream in range(streams):
        handles.append(pipe.add_request(len(handles), prompt(stream, context), config(tokens)))
    mine, got, first = handles[-streams:], 0, None
    while pipe.has_non_finished_requests():
        pipe.step()
        if first is None:
            waiting = [handle for handle in mine if not started(handle)]
            if not waiting:
                first, got = time.perf_counter(), sum(counts.values())
    ended = time.perf_counter()
    counts.clear()
    return (first or ended) - began, ended - (first or ended), streams * tokens - got


handles, counts = [], {}


def started(handle):
    """Whether it has a token; counts those read."""
    if handle.can_read():
        for output in handle.read().values():
            counts[id(handle)] = counts.get(id(handle), 0) + len(output.generated_ids)
    return id(handle) in counts


def main():
    pipe = opened()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        ask = json.loads(line)
        if ask["what"] == "prefill":
            rate = ask["tokens"] / run(pipe, 1, ask["tokens"], 1)[0]
        elif ask["what"] == "decode":
            _, seconds, tokens = run(pipe, ask["streams"], ask["context"], ask["tokens"])
            rate = tokens / seconds
        else:
            rate = perplexity(ask["ids"])
        print(json.dumps({"value": rate}), flush=True)


def perplexity(ids):
    """By the same model outside the pipeline, which gives no logits."""
    model = ov.Core().compile_model(f"{PATH}/openvino_model.xml", "CPU", {"INFERENCE_NUM_THREADS": THREADS})
    row = np.array([ids], dtype=np.int64)
    inputs = {"input_ids": row, "attention_mask": np.ones_like(row), "position_ids": np.arange(len(ids))[None]}
    inputs["beam_idx"] = np.zeros(1, dtype=np.int32)
    names = {name for port in model.inputs for name in port.names}
    result = model.create_infer_request().infer({name: value for name, value in inputs.items() if name in names})
    logits = result["logits"][0].astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    shares = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return float(np.exp(-shares[np.arange(len(ids) - 1), ids[1:]].mean()))


if __name__ == "__main__":
    main()
