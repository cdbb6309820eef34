"""Finds a run's newest step by the numbers in directory names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

# Numbers such as 1000, 1,000, 1_000, 10k, 1.5k and 1e4. In ckpt_3_512, "_" separates two numbers.
_DIGITS = (
    r"\d{1,3}(?:,\d{3})+(?!\d)|(?<!_)\d{1,3}(?:_\d{3})+(?![_\d])|"
    r"\d{1,9}(?:\.\d{1,3})?k(?![a-z0-9])|\d{1,9}e\d(?![a-z0-9])|\d{1,18}"
)
_STEP = re.compile(
    rf"(?:global_?step|step|iter(?:ation)?|checkpoint|ckpt|batch|(?<![a-z0-9])ba)s?[-_=]?({_DIGITS})", re.IGNORECASE
)
STEP_DIRECTORY = re.compile(r"(?:global_?step|step|iter(?:ation)?|checkpoint|ckpt)s?[-_=]?\d{1,18}", re.IGNORECASE)
_EPOCH = re.compile(r"(?:epoch|(?<![a-z0-9])ep)[-_=]?(\d{1,18})", re.IGNORECASE)
_ASIDE = ".aside-"  # a directory that a save renamed; random hex digits follow, such as "ba6"
_NUMBER = re.compile(r"\d{1,18}")
_VERSION = re.compile(r".*-v(\d{1,18})(?:\.\w+)?")  # Lightning adds "-v1" to a name that an earlier run has used


@dataclass(frozen=True, slots=True, order=True)
class StepName:
    """A name that contains a step. Compared by step, then by epoch."""

    step: int
    epoch: int
    name: str = field(compare=False)

    @property
    def has_step(self) -> bool:
        """Whether the name contains a step. A name such as epoch_3 contains only an epoch."""
        return self.step > 0 or self.epoch < 0


def parse_step(name: str) -> StepName | None:
    """Return the step and the epoch in a name. Returns None if the name has neither.

    Such names are global_step10, checkpoint-2, iter_0000010, epoch=0-step=3.ckpt and 1200.
    """
    told = name.partition(_ASIDE)[0]
    step, epoch = _STEP.findall(told), _EPOCH.findall(told)
    if not step:
        bare = told.rpartition(".")[0] or told
        if not epoch and not _NUMBER.fullmatch(bare):
            return None
        step = ["0"] if epoch else [bare]
    return StepName(_value(step[-1]), int(epoch[-1]) if epoch else -1, name)


def _value(digits: str) -> int:
    plain = digits.lower().replace(",", "").replace("_", "")
    number, exponent, power = plain.replace("k", "e3").partition("e")
    return round(float(number) * 10 ** int(power)) if exponent else int(number)


def ordered(names: Iterable[str]) -> list[StepName]:
    """Return the names that contain a step or an epoch, newest first.

    `step_5` comes before copies such as `step_5.aside-1f`.
    """

    def age(step: StepName) -> tuple[int, int, int, bool, str]:
        version = _VERSION.fullmatch(step.name)
        return step.step, step.epoch, int(version[1]) if version else 0, "." not in step.name, step.name

    return sorted((step for name in names if (step := parse_step(name))), key=age, reverse=True)
