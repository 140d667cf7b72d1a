"""The paged runner in plain torch: right against transformers' own, and the same numbers whatever runs beside."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from engine_world import write_model

from workers.engine.architecture import Architecture
from workers.engine.errors import ModelUnusable
from workers.engine.generation import Generation
from workers.engine.gpu.build import Setup, build
from workers.engine.gpu.graphs import SIZES, Staged, size_for
from workers.engine.gpu.kernels import Matrix
from workers.engine.gpu.numerics import Numerics
from workers.engine.gpu.pages import PAGE_TOKENS, Pages
from workers.engine.gpu.passes import Item, passes, place
from workers.engine.gpu.plain import PlainKernels
from workers.engine.gpu.runner import Order, PagedRunner
from workers.engine.gpu.weights import quantised
from workers.engine.scheduler import Work

DRAW = (object.__new__(Generation),)
"""stands for whoever draws: the runner doesn't look"""
LONG = 530
"""tokens: three pages"""
SHAPES = {
    "llama": {},
    "llama untied": {"tie_word_embeddings": False},
    "llama 3.1": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), max_position_embeddings=1024)


def setup_of(directory: Path, **changes: object) -> Setup:
    fields: dict[str, object] = {
        "model_dir": str(directory),
        "device": "reference",
        "int8": False,
        "rank": 0,
        "ranks": 1,
        "port": 0,
        "slots": 6,
        "context_tokens": 1024,
        "threads": 1,
        **changes,
    }
    return Setup(**fields)  # type: ignore[arg-type]


class World:
    """A runner, and its pages to look at."""

    def __init__(self, directory: Path, **changes: object) -> None:
        built = build(setup_of(directory, **changes))
        self.pages = built.rank.pages
        self.kv_tokens = built.kv_tokens
        self.runner = PagedRunner(built.rank, fingerprint="test", vocab_size=272)
        self.all_pages = self.pages.free

    def run(self, *work: Work) -> np.ndarray:
        return self.runner.run(work)


def piece(slot: int, start: int, ids: tuple[int, ...], copies: tuple[int, ...] = ()) -> Work:
    return Work(slot=slot, start=start, ids=ids, stepwise=False, copies=copies, draws=DRAW)  # type: ignore[arg-type]


def steps(slot: int, start: int, ids: tuple[int, ...]) -> Work:
    return Work(slot=slot, start=start, ids=ids, stepwise=True, draws=DRAW)  # type: ignore[arg-type]


def prompt_of(number: int, length: int) -> tuple[int, ...]:
    return tuple(int(token) for token in np.random.default_rng(number).integers(3, 260, length))


@pytest.mark.timeout(600)  # transformers takes its time to import on a busy machine
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_those_of_transformers(tmp_path: Path, shape: str) -> None:
    from transformers import AutoModelForCausalLM

    directory = write_model(tmp_path, max_position_embeddings=1024, **SHAPES[shape])  # type: ignore[arg-type]
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ids = prompt_of(1, LONG)
    with torch.inference_mode():
        expected = theirs(torch.tensor([ids])).logits[0].numpy()
    mine = World(directory)
    got = {299: mine.run(piece(2, 0, ids[:300])), 504: mine.run(piece(2, 300, ids[300:505]))}
    got |= {at: mine.run(steps(2, at, (ids[at],))) for at in range(505, LONG)}
    for at, (row,) in got.items():
        assert np.abs(row - expected[at]).max() < 1e-4 * np.abs(expected[at]).max(), f"position {at}"


def test_a_sequence_computes_the_same_alone_and_in_any_company(model_dir: Path) -> None:
    ids = prompt_of(5, 300)
    others = [prompt_of(number, 290) for number in range(5)]
    alone, crowded = World(model_dir), World(model_dir)
    expected = [alone.run(piece(0, 0, ids[:200])), alone.run(piece(0, 200, ids[200:280]))]
    expected += [alone.run(steps(0, at, (ids[at],))) for at in range(280, 300)]
    for slot, other in enumerate(others):
        crowded.run(piece(slot, 0, other[:250]))

    def beside(at: int) -> list[Work]:
        return [steps(slot, 250 + at, (other[250 + at],)) for slot, other in enumerate(others)]

    got = [crowded.run(*beside(0), piece(5, 0, ids[:200]))[-1:]]
    got.append(crowded.run(piece(5, 200, ids[200:280]), *beside(1))[:1])
    got += [
        crowded.run(*beside(2 + at)[:3], steps(5, 280 + at, (ids[280 + at],)), *beside(2 + at)[3:])[3:4]
        for at in range(20)
    ]
    assert all(np.array_equal(mine, theirs) for mine, theirs in zip(got, expected, strict=True))


def test_replayed_tokens_give_the_bits_of_single_steps_however_many_go_at_once(model_dir: Path) -> None:
    ids = prompt_of(6, SIZES[-1] + 40)
    first, again = World(model_dir), World(model_dir)
    first.run(piece(0, 0, ids[:10]))
    for at in range(10, len(ids)):
        expected = first.run(steps(0, at, (ids[at],)))
    again.run(piece(3, 0, ids[:10]))
    again.run(steps(3, 10, ids[10:23]), piece(1, 0, ids[:50]))
    assert len(ids) - 23 > SIZES[-1], "more than one pass"
    assert np.array_equal(again.run(steps(3, 23, ids[23:])), expected)


@pytest.mark.parametrize("length", [20, PAGE_TOKENS, PAGE_TOKENS + 20])
def test_copies_continue_like_the_original_and_apart(model_dir: Path, length: int) -> None:
    ids = prompt_of(7, length)
    mine = World(model_dir)
    mine.run(piece(0, 0, ids, copies=(2, 5)))
    rows = mine.run(*(steps(slot, length, (9,)) for slot in (0, 2, 5)))
    assert np.array_equal(rows[0], rows[1])
    assert np.array_equal(rows[0], rows[2])
    apart = mine.run(*(steps(slot, length + 1, (10 + slot,)) for slot in (0, 2, 5)))
    alone = World(model_dir)
    alone.run(piece(0, 0, ids))
    alone.run(steps(0, length, (9,)))
    assert np.array_equal(alone.run(steps(0, length + 1, (12,))), apart[1:2])


def test_a_slot_that_begins_anew_or_ended_holds_nothing_of_before(model_dir: Path) -> None:
    mine = World(model_dir)
    mine.run(piece(0, 0, prompt_of(1, 600)), piece(1, 0, prompt_of(2, 300)))
    assert mine.all_pages - mine.pages.free == 3 + 2
    expected = mine.run(piece(2, 0, (5, 6, 7)))
    again = mine.run(piece(0, 0, (5, 6, 7)))
    assert np.array_equal(expected, again)
    assert mine.all_pages - mine.pages.free == 1 + 2 + 1
    mine.runner.release((0, 1, 2))
    mine.run(piece(0, 0, (5,)))
    assert mine.all_pages - mine.pages.free == 1


def test_a_step_without_draws_and_one_without_work_give_no_rows(model_dir: Path) -> None:
    mine = World(model_dir)
    silent = Work(slot=0, start=0, ids=(4, 5), stepwise=False)
    assert len(mine.run(silent)) == len(mine.run()) == 0
    assert mine.run(silent, piece(1, 0, (6,))).shape == (1, 272)


def test_int8_weights_are_near_and_every_number_is_exact_in_bf16(model_dir: Path) -> None:
    weight = torch.randn(40, 96, generator=torch.Generator().manual_seed(1))
    matrix = quantised(weight, None)
    assert matrix.scale is not None
    assert torch.equal(matrix.values.to(torch.bfloat16).to(torch.int8), matrix.values)
    rebuilt = matrix.values * matrix.scale[:, None]
    assert (rebuilt - weight).abs().max() <= matrix.scale.max() / 2 * 1.0001
    rows = torch.randn(3, 96)
    kernels = PlainKernels()
    assert torch.allclose(kernels.linear(rows, matrix), kernels.linear(rows, Matrix(values=rebuilt)), atol=1e-4)
    ids = prompt_of(3, 30)
    exact, near = (World(model_dir, int8=int8).run(piece(0, 0, ids))[0] for int8 in (False, True))
    assert 0 < np.abs(exact - near).max() < 0.05 * np.abs(exact).max()


def test_fewer_pages_than_whole_contexts_promise_fewer_tokens(model_dir: Path) -> None:
    assert World(model_dir).kv_tokens == 6 * 1024
    assert World(model_dir, pages=14).kv_tokens == 13 * 256 - 6 * 255
    with pytest.raises(ModelUnusable, match="room for 0 tokens of 6 sequences"):
        build(setup_of(model_dir, pages=2))


def test_a_model_that_cannot_run_here_is_refused_with_a_reason(tmp_path: Path, model_dir: Path) -> None:
    with pytest.raises(ModelUnusable, match="1024 tokens of context, not 1025"):
        build(setup_of(model_dir, context_tokens=1025))
    with pytest.raises(ModelUnusable, match="3 ranks can't share the model's 2 key heads"):
        build(setup_of(model_dir, ranks=3))
    with pytest.raises(ModelUnusable, match="heads of 12 dimensions"):
        build(setup_of(write_model(tmp_path / "odd", head_dim=12), context_tokens=96))
    broken = write_model(tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(ModelUnusable, match="no whole set of safetensors"):
        build(setup_of(broken, context_tokens=96))


def test_weights_in_several_files_are_those_of_one(tmp_path: Path, model_dir: Path) -> None:
    import json

    from safetensors.torch import load_file, save_file

    directory = write_model(tmp_path, max_position_embeddings=1024)
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    files = {name: f"model-{index % 2}.safetensors" for index, name in enumerate(sorted(tensors))}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in files if files[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    ids = prompt_of(4, 9)
    assert np.array_equal(World(directory).run(piece(0, 0, ids)), World(model_dir).run(piece(0, 0, ids)))
    (directory / "model-1.safetensors").unlink()
    with pytest.raises(ModelUnusable, match="no whole set of safetensors"):
        World(directory)


def test_a_numerics_class_names_weights_and_ranks() -> None:
    assert Numerics.parse("bf16") == Numerics(name="bf16", int8=False, ranks=1)
    assert Numerics.parse("int8-tp12") == Numerics(name="int8-tp12", int8=True, ranks=12)
    for name in ("", "w10x24", "fp8", "bf16-tp1", "bf16-tp0", "bf16-tp", "int8-tp2x"):
        with pytest.raises(ModelUnusable, match="use bf16 or int8"):
            Numerics.parse(name)


def test_a_pass_fits_the_smallest_graph_that_holds_it() -> None:
    assert [size_for(rows) for rows in (1, 2, 3, 5, 16, 17, 200, 256)] == [1, 2, 4, 8, 16, 32, 256, 256]


def test_rows_that_fill_a_graph_up_touch_the_scratch_page_alone(model_dir: Path) -> None:
    """The graph's buffers hold a pass and its padding; run as a batch they give what the pass gives without."""
    built = build(setup_of(model_dir))
    items = [Item(slot, 0, prompt_of(slot, 5 + slot), False) for slot in range(5)]
    with torch.inference_mode():
        place(items, built.rank.pages)
        for work in passes(items, built.rank.pages, 256):
            built.runs.run(work)
        tokens = [Item(slot, 5 + slot, (7,), True, (), 1) for slot in range(5)]
        place(tokens, built.rank.pages)
        (work,) = passes(tokens, built.rank.pages, 256)
        expected = built.runs.run(work)
        staged = Staged(4, torch.device("cpu"))
        staged.fill(work)
        batch = staged.batch(size_for(5))
        assert len(batch.ids) == len(batch.lengths) == len(batch.table) == len(batch.begins) - 1 == 8
        assert (batch.cells[5:] // PAGE_TOKENS == 0).all()
        assert (batch.lengths[5:] == 1).all()
        assert torch.equal(built.model.logits(built.model.rows(batch))[:5], expected)
        staged.fill(passes_of_one(built.rank.pages))
        assert (staged.batch(8).cells[1:] // PAGE_TOKENS == 0).all()


def passes_of_one(pages: Pages) -> object:
    (work,) = passes([Item(2, 7, (7,), True, (), 1)], pages, 256)
    return work


def test_an_architectures_heads_decide_what_a_rank_holds(model_dir: Path) -> None:
    architecture = Architecture.read(model_dir)
    layer = build(setup_of(model_dir)).weights.layers[0]
    assert layer.qkv.values.shape == ((6 + 2 + 2) * 16, architecture.hidden)
    assert (layer.heads.queries, layer.heads.keys) == (6, 2)


def test_blocks_of_the_prefix_cache_give_the_bits_of_computing_and_copy_nothing(model_dir: Path) -> None:
    """Three pieces of one prompt in one step, two of them kept; another slot begins with these."""
    ids = prompt_of(9, 3 * PAGE_TOKENS - 50)
    built = build(setup_of(model_dir, blocks=2))
    rank, pages = built.rank, built.rank.pages
    all_pages = pages.free
    first, second, third = ids[:PAGE_TOKENS], ids[PAGE_TOKENS : 2 * PAGE_TOKENS], ids[2 * PAGE_TOKENS :]
    pieces = (
        Item(0, 0, first, False, save=1),
        Item(0, PAGE_TOKENS, second, False, save=0),
        Item(0, 2 * PAGE_TOKENS, third, False, rows=1),
    )
    computed = rank.obey(Order((), pieces))
    alone = World(model_dir)
    alone.run(piece(0, 0, first))
    alone.run(piece(0, PAGE_TOKENS, second))
    assert np.array_equal(alone.run(piece(0, 2 * PAGE_TOKENS, third)), computed)
    assert all_pages - pages.free == 3
    rank.obey(Order((0,), ()))
    assert all_pages - pages.free == 2
    found = rank.obey(Order((), (Item(4, 2 * PAGE_TOKENS, third, False, (), 1, (1, 0)),)))
    assert torch.equal(found, computed)
    assert all_pages - pages.free == 3
    rank.obey(Order((4,), (Item(2, 0, second, False, save=0),)))
    assert all_pages - pages.free == 2
    rank.obey(Order((2,), ()))
    assert all_pages - pages.free == 2


def test_logits_of_several_rows_of_an_item_come_in_order(model_dir: Path) -> None:
    ids = prompt_of(2, SIZES[-1] + 30)
    rank = build(setup_of(model_dir)).rank
    asked = (Item(1, 0, ids[:4], False, rows=4), Item(0, 0, ids[:9], False, rows=2), Item(2, 0, ids[:5], False))
    got = rank.obey(Order((), asked))
    assert len(got) == 6
    assert torch.equal(got[3], rank.obey(Order((0,), (Item(0, 0, ids[:4], False, rows=1),)))[0])
    many = Item(0, 4, ids[4:], True, rows=SIZES[-1] + 3)
    rows = rank.obey(Order((), (Item(2, 5, (8,), True, rows=1), many)))[1:]
    assert len(rows) == SIZES[-1] + 3
    assert torch.equal(rows[-1:], rank.obey(Order((), (Item(0, len(ids) - 1, ids[-1:], True, rows=1),))))
    assert torch.equal(rows[:1], rank.obey(Order((), (Item(0, 27, (ids[27],), True, rows=1),))))
