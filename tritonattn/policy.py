"""Which backend was faster where: a small table that a sweep measured and dispatch looks into.

A policy is a JSON file: where it was measured, and one entry for each case, with the time of each
backend in microseconds, its plan's share included. Looking up takes the nearest case of the same
op, dtype and head_dim, by the sum of the distances of heads, batch size and key length, each in
octaves; nothing further than `REACH` octaves in any of them counts as measured.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from tritonattn.backends import is_backend
from tritonattn.spec import DTYPE_NAMES, DTYPES, AttentionSpec

FORMAT = 1
OPS = ("decode", "short", "prefill")
REACH = 2.0  # octaves
# Below this it is a tie, and ties go to Triton.
TIE = 1.02
_SHIPPED = Path(__file__).parent / "policies"


@dataclass(frozen=True, slots=True)
class Entry:
    """A measured case."""

    op: str  # decode: one query token a request; short: up to 8; prefill: more
    dtype: str
    head_dim: int
    num_qo_heads: int
    num_kv_heads: int
    batch_size: int
    kv_len: int  # tokens, the longest
    us: Mapping[str, float]  # backend -> time of a layer, with its share of the plan

    @property
    def ranking(self) -> list[str]:
        """Return the backends, the one to take first."""
        order = sorted(self.us, key=lambda name: self.us[name])
        if "triton" in self.us and self.us["triton"] <= TIE * self.us[order[0]]:
            order.sort(key=lambda name: name != "triton")
        return order

    @property
    def winner(self) -> tuple[str, float]:
        """Return the backend to take, and how much slower the next one is."""
        best = self.ranking[0]
        others = [time for name, time in self.us.items() if name != best]
        return best, min(others, default=math.inf) / self.us[best]

    def __str__(self) -> str:
        """Return the case in words."""
        heads = f"{self.num_qo_heads}/{self.num_kv_heads} heads of {self.head_dim}"
        return f"{self.op} of {self.batch_size} x {self.kv_len} keys, {heads}, {self.dtype}"


@dataclass(frozen=True, eq=False)
class Policy:
    """A table and where it was measured. Compared and hashed by identity."""

    source: str
    environment: Mapping[str, str]  # gpu, triton, flashinfer
    entries: tuple[Entry, ...]
    problem: str = ""  # why it is not used

    def nearest(self, spec: AttentionSpec) -> Entry | None:
        """Return the measured case that is nearest to a call, if one is near."""
        op, dtype = op_of(spec), DTYPE_NAMES.get(spec.q_dtype)
        found = [
            (distance, i)
            for i, entry in enumerate(self.entries)
            if (entry.op, entry.dtype, entry.head_dim) == (op, dtype, spec.head_dim_qk)
            and (distance := _distance(entry, spec)) is not None
        ]
        return self.entries[min(found)[1]] if found else None

    def mismatch(self, environment: Mapping[str, str]) -> str | None:
        """Return why the table does not hold elsewhere, as a sentence, or None."""
        if self.problem:
            return self.problem
        for name, measured in self.environment.items():
            here = environment.get(name, "nothing")
            if measured != here:
                return (
                    f"the policy {self.source} was measured with {name} {measured}, here it is "
                    f"{here}: run `tritonattn tune`"
                )
        return None


def op_of(spec: AttentionSpec) -> str:
    """Return what kind of step a call is, as far as its static facts say."""
    return op_of_lengths(spec.max_q_len)


def op_of_lengths(max_q_len: int) -> str:
    """Return the op of a step whose longest query has so many tokens."""
    if max_q_len <= 1:
        return "decode"
    return "short" if max_q_len <= 8 else "prefill"


def _distance(entry: Entry, spec: AttentionSpec) -> float | None:
    pairs = (
        (entry.num_qo_heads, spec.num_qo_heads),
        (entry.num_kv_heads, spec.num_kv_heads),
        (entry.batch_size, spec.batch_size),
        (entry.kv_len, spec.max_kv_len),
    )
    octaves = [abs(math.log2(max(a, 1) / max(b, 1))) for a, b in pairs]
    return sum(octaves) if max(octaves) <= REACH else None


@functools.cache
def environment_of(device: torch.device) -> Mapping[str, str]:
    """Return what a table depends on, of a device and this process."""
    facts = {"gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else "none"}
    for name, package in (("triton", "triton"), ("flashinfer", "flashinfer-python")):
        try:
            facts[name] = metadata.version(package)
        except metadata.PackageNotFoundError:
            facts[name] = "nothing"
    return facts


def shipped() -> dict[str, Path]:
    """Return the policies that come with the package, by name."""
    return {path.stem: path for path in sorted(_SHIPPED.glob("*.json"))}


def read_policy(path: Path | str) -> Policy:
    """Read a file, or what ships under a name; raise `ValueError` if it is no policy."""
    path = shipped().get(str(path), Path(path))
    if not path.suffix and not path.exists():
        known = ", ".join(shipped()) or "none"
        raise ValueError(f"{path} is neither a file nor a policy that ships: these do: {known}")
    try:
        data = json.loads(path.read_text())
        if data["format"] != FORMAT:
            raise ValueError(f"its format is {data['format']}, {FORMAT} is known")
        environment = {str(name): str(value) for name, value in data["environment"].items()}
        entries = tuple(Entry(**entry) for entry in data["entries"])
        if "gpu" not in environment:
            raise ValueError("it does not say which GPU it was measured on")
        for entry in entries:
            _check_entry(entry)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is no policy: {error}") from error
    return Policy(str(path), environment, entries)


def _check_entry(entry: Entry) -> None:
    numbers = (entry.head_dim, entry.num_qo_heads, entry.num_kv_heads, entry.batch_size)
    if not all(type(number) is int and number > 0 for number in (*numbers, entry.kv_len)):
        raise ValueError(f"{entry} has a count that is no positive integer")
    if entry.op not in OPS or entry.dtype not in DTYPES:
        raise ValueError(f"{entry} has an op or a dtype that is unknown")
    times = entry.us.values()
    if not times or not all(isinstance(t, int | float) and 0 < t < math.inf for t in times):
        raise ValueError(f"{entry} has no times")
    unknown = [name for name in entry.us if not is_backend(name)]
    if unknown:
        raise ValueError(f"{entry} names the backends {unknown}, which are unknown")
    if "flashinfer:xqa" in entry.us:
        raise ValueError(f"{entry} names flashinfer:xqa, which gives no LSE: auto must be able to")


def write_policy(path: Path, environment: Mapping[str, str], entries: Sequence[Entry]) -> None:
    """Write a policy, one entry a line."""
    lines = ",\n".join(f"  {json.dumps(_plain(entry))}" for entry in entries)
    head = json.dumps({"format": FORMAT, "environment": dict(environment)})
    path.write_text(f'{head[:-1]}, "entries": [\n{lines}\n]}}\n')


def _plain(entry: Entry) -> dict[str, Any]:
    return dataclasses.asdict(entry) | {"us": {k: round(v, 2) for k, v in entry.us.items()}}
