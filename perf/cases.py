"""What is measured, as data: model shapes, lengths of a batch, and the cases made of them.

A case is a frozen record of plain values; its name is unique for the whole set of them. Users bring
their own in a YAML or JSON file: `load_cases`.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tritonattn.cases import AttentionCase
from tritonattn.cli import need
from tritonattn.spec import DTYPES

# name -> (num_qo_heads, num_kv_heads, head_dim), each on one GPU
MODELS = {
    "llama3-8b": (32, 8, 128),
    "llama3-70b-tp8": (8, 1, 128),
    "qwen2.5-7b": (28, 4, 128),
    "llama4-scout": (40, 8, 128),
    "mistral-large-2": (96, 8, 128),
    "gemma-2-9b": (16, 8, 256),
    "gpt-oss-20b": (64, 8, 64),
    "mha-32": (32, 32, 128),
    "tiny": (4, 2, 16),
}
ATTENTION_OPS = ("decode", "prefill", "mixed", "speculative", "host")
BLOCK_OPS = ("copy_blocks", "swap_blocks", "swap_blocks to host", "swap_blocks from host")
MAX_DRAWN_KV_LEN = 131072
MAX_REQUESTS = 65536

_GROUP = re.compile(r"(\d+)x(\d+)x(\w+(?:\([^()\s]*\))?)")
# What a field of a file may be, by its annotation. A bool is no int here.
_FILE_TYPES = {"str": (str,), "int": (int,), "bool": (bool,), "float": (int, float)}


@dataclass(frozen=True, slots=True)
class StepCase:
    """One attention call of one layer, for a batch.

    `lengths` is a sum of groups `requests x query tokens x key tokens`, such as `64x1x1024` or
    `60x1x4096+2x2048x4096`. Instead of a number of key tokens a group may have a distribution:
    `uniform(low,high,seed)`, `lognormal(median,sigma,seed)`, both drawn from Python's `random`, or
    `cycle(start,step,modulus)`, request i having start + step * i mod modulus.
    """

    op: str
    model: str  # a name of MODELS, or "num_qo_heads/num_kv_heads/head_dim"
    lengths: str
    page_size: int = 16  # tokens
    kv_layout: str = "NHD"
    dtype: str = "bf16"
    causal: bool = True
    window_left: int = -1  # tokens
    logits_soft_cap: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what no case can be."""
        _check_choice("op", self.op, ATTENTION_OPS)
        _check_choice("kv_layout", self.kv_layout, ("NHD", "HND"))
        _check_choice("dtype", self.dtype, tuple(DTYPES))
        _check_least("page_size", self.page_size, 1)
        _check_least("window_left", self.window_left, -1)
        _check_least("logits_soft_cap", self.logits_soft_cap, 0)
        heads_of(self.model)
        if self.op == "decode" and max(self.tokens()[0], default=0) > 1:
            raise ValueError(f"decode has one query token a request, got lengths {self.lengths!r}")
        if sum(self.tokens()[0]) == 0:
            raise ValueError(f"lengths must have at least one query token, got {self.lengths!r}")

    @property
    def name(self) -> str:
        """Return all parameters, `decode-llama3-8b-64x1x1024-p16-NHD-bf16`."""
        parts = [self.op, self.model, self.lengths, f"p{self.page_size}", self.kv_layout]
        parts.append(self.dtype)
        if not self.causal:
            parts.append("full")
        return "-".join(parts + ([self.features] if self.features else []))

    @property
    def features(self) -> str:
        """Return the optional features of the mask, empty if there are none."""
        window = [f"w{self.window_left}"] if self.window_left >= 0 else []
        cap = [f"cap{float(self.logits_soft_cap)!r}"] if self.logits_soft_cap > 0 else []
        return "-".join(window + cap)

    def tokens(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the query and the key lengths of all requests, in tokens."""
        return expand_lengths(self.lengths)

    def attention_case(self) -> AttentionCase:
        """Return the case as the tests and the diff know it."""
        return AttentionCase(
            *self.tokens(),
            *heads_of(self.model),
            page_size=self.page_size,
            kv_layout="NHD" if self.kv_layout == "NHD" else "HND",
            dtype=DTYPES[self.dtype],
            causal=self.causal,
        )


@dataclass(frozen=True, slots=True)
class BlockCase:
    """Pages moved in the caches of all layers, in random order on both sides."""

    what: str  # one of BLOCK_OPS
    model: str
    num_layers: int
    moved: int  # pages
    pool: int  # pages of a layer; at least twice those moved
    page_size: int = 16  # tokens
    kv_layout: str = "NHD"
    dtype: str = "bf16"

    op = "block_copy"

    def __post_init__(self) -> None:
        """Refuse what no case can be."""
        _check_choice("what", self.what, BLOCK_OPS)
        _check_choice("kv_layout", self.kv_layout, ("NHD", "HND"))
        _check_choice("dtype", self.dtype, tuple(DTYPES))
        _check_least("num_layers", self.num_layers, 1)
        _check_least("page_size", self.page_size, 1)
        heads_of(self.model)
        if not 0 < 2 * self.moved <= self.pool:
            raise ValueError(
                f"pool must hold at least 2 * moved = {2 * self.moved} pages, got {self.pool}"
            )

    @property
    def name(self) -> str:
        """Return all parameters."""
        return (
            f"{self.what}-{self.model}-{self.num_layers}x{self.moved}of{self.pool}"
            f"-p{self.page_size}-{self.kv_layout}-{self.dtype}"
        )

    @property
    def lengths(self) -> str:
        """Return layers x pages."""
        return f"{self.num_layers}x{self.moved}"


Case = StepCase | BlockCase


def heads_of(model: str) -> tuple[int, int, int]:
    """Return (num_qo_heads, num_kv_heads, head_dim) of a model's name or of `32/8/128`."""
    if model in MODELS:
        return MODELS[model]
    parts = model.split("/")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(
            f"model must be one of {tuple(MODELS)} or num_qo_heads/num_kv_heads/head_dim, "
            f"got {model!r}"
        )
    qo, kv, dim = map(int, parts)
    if qo % kv:
        raise ValueError(f"num_qo_heads must be a multiple of num_kv_heads, got {model!r}")
    return qo, kv, dim


def expand_lengths(text: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the query and key lengths that a text like `60x1x4096+2x2048x4096` stands for."""
    q_lens: list[int] = []
    kv_lens: list[int] = []
    for group in text.split("+"):
        match = _GROUP.fullmatch(group)
        if match is None:
            raise ValueError(
                f"lengths must be groups of requests x q tokens x kv tokens, got {group!r}"
            )
        count, q_len = int(match[1]), int(match[2])
        if count > MAX_REQUESTS:
            raise ValueError(f"a group must have at most {MAX_REQUESTS} requests, got {count}")
        if match[3].isdecimal() and int(match[3]) < q_len:
            raise ValueError(f"kv tokens include the q tokens, got {group!r}")
        q_lens += [q_len] * count
        kv_lens += [max(q_len, length) for length in _key_lengths(match[3], count)]
    return tuple(q_lens), tuple(kv_lens)


def _key_lengths(text: str, count: int) -> list[int]:
    if text.isdecimal():
        return [int(text)] * count
    name, _, rest = text.partition("(")
    values = [float(value) for value in rest.rstrip(")").split(",") if value.strip()]
    if name not in ("uniform", "lognormal", "cycle") or len(values) != 3:
        raise ValueError(
            "kv tokens must be a number, uniform(low,high,seed), lognormal(median,sigma,seed) or "
            f"cycle(start,step,modulus), got {text!r}"
        )
    if name == "cycle":
        start, step, modulus = map(int, values)
        return [start + step * i % modulus for i in range(count)]
    # Seeded from the text, so that the draw is the same on every machine and version of torch.
    draw = random.Random(text)
    if name == "uniform":
        return [draw.randint(int(values[0]), int(values[1])) for _ in range(count)]
    lengths = [values[0] * math.exp(draw.gauss(0.0, values[1])) for _ in range(count)]
    return [min(max(1, round(length)), MAX_DRAWN_KV_LEN) for length in lengths]


def load_cases(path: Path) -> list[Case]:
    """Read a user's cases.

    Parameters
    ----------
    path : Path
        `.json`, or anything else as YAML: a list of mappings with the fields of `StepCase`, or of
        `BlockCase` for `op: block_copy`. A field that is a list stands for one case for each value.

    Raises
    ------
    ValueError
        If the file is not such a list, with the entry that is wrong.
    """
    parse: Any = json.loads
    problem: Any = json.JSONDecodeError
    if path.suffix != ".json":
        yaml = need("yaml", "perf")
        parse, problem = yaml.safe_load, yaml.YAMLError
    try:
        entries = parse(path.read_text())
    except problem as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"{path} must hold a list of cases, each a mapping of fields")
    cases = [case for entry in entries for case in _cases_of(path, entry)]
    twice = sorted({case.name for case in cases if sum(c.name == case.name for c in cases) > 1})
    if twice:
        raise ValueError(f"{path} names cases twice: {', '.join(twice)}")
    return cases


def _cases_of(path: Path, entry: dict[str, Any]) -> Iterator[Case]:
    kind = BlockCase if entry.get("op") == BlockCase.op else StepCase
    fields = {field.name: str(field.type) for field in dataclasses.fields(kind)}
    unknown = [name for name in entry if name not in fields and name != "op"]
    if unknown:
        raise ValueError(
            f"{path}: unknown fields {unknown} in {entry}, allowed are {', '.join(fields)}"
        )
    values = {name: value for name, value in entry.items() if name in fields}
    axes = [value if isinstance(value, list) else [value] for value in values.values()]
    for chosen in itertools.product(*axes):
        try:
            for name, value in zip(values, chosen, strict=True):
                if type(value) not in _FILE_TYPES[fields[name]]:
                    raise ValueError(f"{name} must be of type {fields[name]}, got {value!r}")
            yield kind(**dict(zip(values, chosen, strict=True)))
        except (TypeError, ValueError, ArithmeticError) as error:
            raise ValueError(f"{path}: {error} in {entry}") from error


def _check_least(name: str, value: float, least: int) -> None:
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {allowed}, got {value!r}")
