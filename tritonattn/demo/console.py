"""The demo's output while it runs: a bar of tokens, and the texts line by line as they grow."""

from __future__ import annotations

import sys
from typing import Any

from tritonattn.cli import need

_LINE = 76  # characters of text in a line
_TAIL = 22  # characters of each unfinished line beside the bar


class TextStream:
    """Shows tokens as they come; its call is the `on_tokens` of `generate`."""

    def __init__(self, tokenizer: Any, num_prompts: int, max_new_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._shown = [0] * num_prompts  # characters of each text that are in finished lines
        self._tail = [""] * num_prompts
        self._count = [0] * num_prompts
        self._tqdm = need("tqdm", "engines").tqdm
        # A log gets the lines, and the bar only now and then.
        interval = 0.1 if sys.stderr.isatty() else 20.0
        self._bar = self._tqdm(
            total=num_prompts * max_new_tokens,
            unit="token",
            mininterval=interval,
            bar_format="{n_fmt}/{total_fmt} tokens [{elapsed}<{remaining}, {rate_fmt}]{postfix}",
        )

    def __enter__(self) -> TextStream:
        """Return itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close the bar."""
        self._bar.close()

    def __call__(self, index: int, tokens: list[int], finished: bool) -> None:
        """Show what is new of a text."""
        text = decode(self._tokenizer, tokens)
        if not finished:
            # A character of several bytes is not complete yet.
            text = text.rstrip("\ufffd")
        line = text[self._shown[index] :]
        while line and (finished or len(line) > _LINE or "\n" in line):
            end = _line_end(line)
            if line[:end].strip():
                self._tqdm.write(f"  [{index + 1}] {line[:end].strip()}", file=sys.stdout)
            self._shown[index] += end
            line = line[end:]
        self._tail[index] = " ".join(line.split())[-_TAIL:]
        postfix = " ".join(f"[{i + 1}] {tail}" for i, tail in enumerate(self._tail) if tail)
        self._bar.set_postfix_str(postfix, refresh=False)
        self._bar.update(len(tokens) - self._count[index])
        self._count[index] = len(tokens)


def decode(tokenizer: Any, tokens: list[int]) -> str:
    """Return the text of tokens as it stands, without special tokens."""
    return str(
        tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    )


def _line_end(text: str) -> int:
    """Return where a line breaks: after the first newline, or after the last space that fits."""
    newline = text.find("\n", 0, _LINE)
    if newline >= 0:
        return newline + 1
    if len(text) <= _LINE:
        return len(text)
    space = text.rfind(" ", 1, _LINE)
    return space + 1 if space > 0 else _LINE
