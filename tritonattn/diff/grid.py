"""`tritonattn diff`: a named grid of cases through a backend, its peer and the fp64 oracle.

A grid is data; `diff_case` turns one case into reports; `run` is the command. A case that fails can
be dumped to a file with its inputs, and replayed from there.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from tritonattn import env
from tritonattn.attention import explain, paged_attention
from tritonattn.backends import BACKENDS, get_backend
from tritonattn.cases import AttentionCase, AttentionInputs, make_inputs, reference_results
from tritonattn.cli import UsageError, need
from tritonattn.diff import DiffReport, compare, dump_case, load_case, reports_to_frame
from tritonattn.spec import DTYPES

PEERS = ("flashinfer", "torch")
PAGE_SIZES = (1, 8, 16, 64)

# (num_qo_heads, num_kv_heads, head_dim): Llama-3 8B, its TP8 shard, Qwen2.5-7B, MHA, SmolLM2,
# Gemma.
_SHAPES = [(32, 8, 128), (8, 1, 128), (28, 4, 128), (32, 32, 128), (9, 3, 64), (16, 8, 256)]
_SMALL_SHAPES = [(4, 2, 16), (9, 3, 32), (7, 1, 64)]

# (q_lens, kv_lens) of a batch: empty and one-token requests, lengths that are no multiple of any
# tile.
_Lengths = tuple[tuple[int, ...], tuple[int, ...]]
_LENGTHS: dict[str, list[_Lengths]] = {
    "decode": [
        ((1,) * 9, (1, 16, 17, 0, 97, 512, 2048, 5000, 333)),
        ((1,) * 2, (16384, 54)),
    ],
    "prefill": [
        ((37, 127, 1, 0, 577, 17), (54, 127, 97, 5, 577, 17)),
        ((16, 200, 33), (1040, 200, 20)),
    ],
    "mixed": [((1, 300, 1, 5, 1, 0), (4096, 900, 0, 77, 33, 0))],
    "speculative": [((5,) * 6, (4096, 5, 3, 0, 700, 33)), ((2, 8, 4), (100, 8, 2048))],
}
_SMALL_LENGTHS: dict[str, list[_Lengths]] = {
    "decode": [((1,) * 4, (1, 17, 0, 70))],
    "prefill": [((12, 20, 0), (12, 33, 5))],
    "mixed": [((1, 18, 3), (40, 18, 2))],
    "speculative": [((5, 2), (30, 4))],
}
GRIDS = tuple(_LENGTHS)


def grid(
    name: str,
    page_sizes: tuple[int, ...] = PAGE_SIZES,
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,),
    quick: bool = False,
) -> list[AttentionCase]:
    """Return the cases of a grid; layouts and table forms alternate along it.

    Parameters
    ----------
    name : {"decode", "prefill", "mixed", "speculative"}
    page_sizes : tuple of int
        In tokens.
    dtypes : tuple of torch.dtype
    quick : bool
        Small shapes, as the interpreter needs.

    Returns
    -------
    list of AttentionCase
    """
    if name not in GRIDS:
        raise ValueError(f"grid must be one of {GRIDS}, got {name!r}")
    lengths = (_SMALL_LENGTHS if quick else _LENGTHS)[name]
    shapes = _SMALL_SHAPES if quick else _SHAPES
    axes = itertools.product(lengths, shapes, page_sizes, dtypes)
    return [
        AttentionCase(
            q_lens,
            kv_lens,
            *shape,
            page_size=page_size,
            dtype=dtype,
            kv_layout="NHD" if i % 2 else "HND",
            table="csr" if i // 2 % 2 else "dense",
        )
        for i, ((q_lens, kv_lens), shape, page_size, dtype) in enumerate(axes)
    ]


def diff_inputs(
    inputs: AttentionInputs, name: str, backend: str = "triton", peer: str = "flashinfer"
) -> list[DiffReport]:
    """Compare a backend's output and LSE with a peer's, both against fp64.

    The peer gets the cache without its poison: FlashInfer reads unused slots of the last page.
    """
    end = int(inputs.qo_indptr[-1])
    actual = _run(inputs, backend)
    expected = (
        reference_results(inputs, inputs.q.dtype)
        if peer == "torch"
        else _run(inputs.unpoisoned(), peer)
    )
    oracle = reference_results(inputs)
    return [
        compare(
            actual[i][:end],
            expected[i][:end],
            oracle[i][:end],
            name=f"{name} {what}",
            lse=what == "lse",
            qo_indptr=inputs.qo_indptr,
        )
        for i, what in enumerate(("out", "lse"))
    ]


def _run(inputs: AttentionInputs, backend: str) -> tuple[Tensor, Tensor]:
    results = paged_attention(**inputs.arguments(), backend=backend, return_lse=True)
    assert isinstance(results, tuple)
    return results


def default_peer(device: str, quick: bool) -> str:
    """Return FlashInfer where it can run (it refuses the small shapes), else torch."""
    if quick or not device.startswith("cuda"):
        return "torch"
    inputs = make_inputs(AttentionCase((1,), (1,), 8, 8, 128), device)
    verdict = explain(**inputs.arguments()).verdicts["flashinfer"]
    return "flashinfer" if verdict.startswith("accepts") else "torch"


def _page_size(text: str) -> int:
    """Parse a page size; argparse shows the message, not a traceback."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a number of tokens, at least 1, got {text!r}")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tritonattn diff`."""
    parser.add_argument("--grid", nargs="+", default=list(GRIDS), choices=GRIDS)
    parser.add_argument("--backend", default="triton", choices=BACKENDS, help="the side to judge")
    parser.add_argument(
        "--against",
        choices=PEERS,
        help="the second implementation: flashinfer, or torch (eager attention in the same dtype); "
        "default: flashinfer where it can run",
    )
    parser.add_argument("--page-size", nargs="+", type=_page_size, default=list(PAGE_SIZES))
    parser.add_argument("--dtype", nargs="+", default=["bf16"], choices=list(DTYPES))
    parser.add_argument("--device", help="default: cuda if there is one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="small shapes (always so on the CPU)")
    parser.add_argument("--verbose", action="store_true", help="print each report in full")
    parser.add_argument("--csv", type=Path, help="write the table as CSV")
    parser.add_argument("--json", type=Path, help="write the table as JSON records")
    parser.add_argument("--dump", type=Path, help="save the inputs of failing cases in this folder")
    parser.add_argument("--replay", type=Path, help="compare the inputs of one saved case instead")


def run(arguments: argparse.Namespace) -> int:
    """Run `tritonattn diff`; return 1 if a comparison fails."""
    tqdm = need("tqdm", "perf").tqdm
    need("pandas", "perf")
    _check_files(arguments)
    device = arguments.device
    backend = get_backend(arguments.backend)
    peer = arguments.against or default_peer(device, arguments.quick)
    calls = list(_calls(arguments, device))
    sides = (("--backend", backend.name), ("--against", peer))
    _check_sides(sides, [source for _, source in calls], device)
    reports: list[DiffReport] = []
    bar = tqdm(calls, unit="case", desc=f"{backend.name} vs {peer}")
    for name, source in bar:
        inputs = source if isinstance(source, AttentionInputs) else _draw(source, device, arguments)
        found = diff_inputs(inputs, name, backend.name, peer)
        reports += found
        if arguments.dump and not all(report.passed for report in found):
            _dump(arguments.dump, name, inputs)
        bar.set_postfix(failed=sum(not report.passed for report in reports))
    return _finish(reports, arguments)


def _calls(
    arguments: argparse.Namespace, device: str
) -> Iterator[tuple[str, AttentionCase | AttentionInputs]]:
    if arguments.replay:
        yield _replayed(arguments.replay, device)
        return
    quick = arguments.quick or (device == "cpu" and env.INTERPRET)
    dtypes = tuple(DTYPES[name] for name in arguments.dtype)
    for name in arguments.grid:
        for case in grid(name, tuple(arguments.page_size), dtypes, quick):
            yield f"{name} {case}", case


def _replayed(file: Path, device: str) -> tuple[str, AttentionInputs]:
    """Load a saved case; whatever is wrong with the file is a wrong argument."""
    try:
        values = load_case(file, device=device)
    except OSError as error:
        raise UsageError(f"--replay: cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"--replay: {error}") from error
    except (EOFError, RuntimeError, pickle.UnpicklingError) as error:  # torch.load, on other files
        raise UsageError(
            f"--replay must name a file that --dump wrote, {file} is none ({type(error).__name__})"
        ) from error
    expected = {"name", *(field.name for field in dataclasses.fields(AttentionInputs))}
    if values.keys() != expected:
        raise UsageError(
            f"--replay must name a file that --dump wrote, with {sorted(expected)}; "
            f"{file} has {sorted(values)}"
        )
    return values.pop("name"), AttentionInputs(**values)


def _check_files(arguments: argparse.Namespace) -> None:
    """Find out before the grid runs that its results could not be written."""
    for option, file in (("--csv", arguments.csv), ("--json", arguments.json)):
        if file is None:
            continue
        if not file.parent.is_dir():
            raise UsageError(f"{option}: there is no folder {file.parent}")
        if file.is_dir():
            raise UsageError(f"{option} must name a file, got the folder {file}")
        if not os.access(file if file.exists() else file.parent, os.W_OK):
            raise UsageError(f"{option}: {file} cannot be written")
    if arguments.dump and arguments.dump.exists() and not arguments.dump.is_dir():
        raise UsageError(f"--dump must name a folder, got the file {arguments.dump}")


def _check_sides(
    sides: Sequence[tuple[str, str]],
    sources: Sequence[AttentionCase | AttentionInputs],
    device: str,
) -> None:
    """Refuse a backend that cannot take some case; one small draw stands for all its lengths."""
    probes = dict.fromkeys(
        dataclasses.replace(source, q_lens=(1,), kv_lens=(1,), kv_layout="NHD", table="dense")
        for source in sources
        if isinstance(source, AttentionCase)
    )
    inputs = [source for source in sources if isinstance(source, AttentionInputs)]
    inputs += [make_inputs(probe, device) for probe in probes]
    for option, name in sides:
        if name == "torch":
            continue
        if name == "flashinfer" and device.startswith("cuda"):
            need("flashinfer", "flashinfer")
        for each in inputs:
            verdict = explain(**each.arguments()).verdicts[name]
            if not verdict.startswith("accepts"):
                raise UsageError(f"{option} {name}: {verdict}")


def _draw(case: AttentionCase, device: str, arguments: argparse.Namespace) -> AttentionInputs:
    return make_inputs(case, device, arguments.seed)


def _dump(folder: Path, name: str, inputs: AttentionInputs) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / (name.replace(" ", "_").replace("/", "-") + ".pt")
    values = {
        field.name: getattr(inputs, field.name) for field in dataclasses.fields(AttentionInputs)
    }
    dump_case(file, name=name, **values)


def _finish(reports: list[DiffReport], arguments: argparse.Namespace) -> int:
    frame = reports_to_frame(reports)
    for report in reports:
        if arguments.verbose or not report.passed:
            print(report, end="\n\n")
    columns = {
        "name": "case",
        "passed": "passed",
        "max_abs": "max_abs",
        "actual_err_max_ulps": "ours_ulps",
        "expected_err_max_ulps": "peer_ulps",
        "allowed_max_ulps": "allowed",
        "verdict": "verdict",
    }
    table = frame[list(columns)].rename(columns=columns)
    print(table.to_string(index=False, float_format="{:.3g}".format))
    failed = sum(not report.passed for report in reports)
    print(f"{len(reports)} comparisons, {failed} failed")
    if arguments.csv:
        frame.to_csv(arguments.csv, index=False)
    if arguments.json:
        records = [report.to_dict() for report in reports]
        arguments.json.write_text(json.dumps(records, indent=1) + "\n")
    return 1 if failed or not reports else 0
