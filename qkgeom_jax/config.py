"""Every number of a study: frozen dataclasses, the three presets, and what is allowed.

A `Config` describes one *group*: one depth, one query/key initialisation, one intervention, and all the seeds that
train together in one device program. Each field carries the help text of its command-line flag and whether changing
it compiles a new program (``recompiles``).
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

INITIALIZATIONS = ("qk_identical", "disjoint_support", "independent")
COMPUTE_DTYPES = ("float32", "bfloat16")
# The arms of Table 2, the baseline first. A user's own is FILE.py:name.
INTERVENTIONS = (
    "none", "k_spectrum_clamp", "forced_k_contraction", "freeze_q", "freeze_k", "qk_decouple", "qk_align",
)  # fmt: skip
# An arm that means something from one initialisation only.
REQUIRED_INIT = {"qk_decouple": "qk_identical"}
# Arms with a dose, written ARM@DOSE, and the field of `InterventionConfig` that the dose stands for.
DOSES = {"k_spectrum_clamp": "clamp_strength", "forced_k_contraction": "contraction_factor"}
MAXIMUM_SEED = 2**31 - 1
# What is counted on the device is counted in 32 bits, and no device holds an array of more numbers than that.
MAXIMUM_COUNT, MAXIMUM_ARRAY = 2**31 - 1, 2**36
LARGEST_FLOAT32 = 3.4028234e38
# Blocks are unrolled; probes are kept whole.
MAXIMUM_DEPTH, MAXIMUM_PROBE = 1024, 2**24


def option(default: Any, text: str, *, recompiles: bool = False) -> Any:
    """A dataclass field with the help text of its flag."""
    return dataclasses.field(default=default, metadata={"help": text, "recompiles": recompiles})


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """The end of a message about a name that is not known: the nearest known one, or `otherwise`."""
    near = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {near[0]}?" if near else otherwise


def arm_name(intervention: str) -> str:
    """An arm as tables and folders have it: of FILE.py:name the name."""
    return intervention.rpartition(":")[2]


def split_dose(arm: str) -> tuple[str, str | None]:
    """An arm without its dose, and the dose as text: None where it has that of the configuration."""
    name, at, dose = arm.partition("@")
    return name, dose if at else None


def shown(value: Any) -> str:
    """A value in a message; a whole number may have more digits than Python writes."""
    try:
        return repr(value)
    except ValueError:
        return "a number of thousands of digits"


def _require(condition: bool, field: str, got: Any, allowed: str) -> None:
    if not condition:
        raise ValueError(f"{field} is {shown(got)}; allowed: {allowed}")


def _require_count(field: str, got: Any, least: int = 1, most: int = MAXIMUM_COUNT) -> None:
    whole = isinstance(got, int) and not isinstance(got, bool)
    _require(whole and got >= least, field, got, f"a whole number of at least {least}")
    _require(got <= most, field, got, f"a whole number of at most {most}")


def _require_number(field: str, got: Any, *, positive: bool = False, below: float = math.inf) -> None:
    number = isinstance(got, (int, float)) and not isinstance(got, bool) and abs(got) < math.inf
    low = got > 0 if number and positive else number and got >= 0
    bound = "" if below == math.inf else f" and below {below:g}"
    least = "greater than 0" if positive else "of at least 0"
    _require(bool(low) and got < below, field, got, f"a finite number {least}{bound}")
    _require(got <= LARGEST_FLOAT32, field, got, f"a number that float32 can hold, at most {LARGEST_FLOAT32:.2g}")


@dataclass(frozen=True)
class ModelConfig:
    """The decoder-only transformer. Every field changes the compiled program."""

    depth: int = option(4, "number of transformer blocks", recompiles=True)
    width: int = option(64, "residual width", recompiles=True)
    heads: int = option(1, "attention heads; must divide the width", recompiles=True)
    context: int = option(64, "positions a sequence has", recompiles=True)
    vocabulary: int = option(256, "distinct token ids; set from the corpus", recompiles=True)
    mlp_ratio: int = option(4, "hidden width of the MLP over the residual width", recompiles=True)
    init: str = option("independent", "query/key initialisation", recompiles=True)
    compute_dtype: str = option("float32", "number format of the forward and backward pass", recompiles=True)
    rematerialise: bool = option(False, "recompute activations in the backward pass to save memory", recompiles=True)

    def __post_init__(self) -> None:
        for name in ("depth", "width", "heads", "context", "vocabulary", "mlp_ratio"):
            _require_count(name, getattr(self, name))
        _require_count("depth", self.depth, most=MAXIMUM_DEPTH)
        _require(self.width % self.heads == 0, "heads", self.heads, f"a divisor of the width, {self.width}")
        _require(self.context >= 2, "context", self.context, "a whole number of at least 2")
        _require(self.init in INITIALIZATIONS, "init", self.init, ", ".join(INITIALIZATIONS))
        _require(self.compute_dtype in COMPUTE_DTYPES, "compute_dtype", self.compute_dtype, ", ".join(COMPUTE_DTYPES))
        _require(isinstance(self.rematerialise, bool), "rematerialise", self.rematerialise, "true, false")
        if self.init == "disjoint_support":
            _require(self.width % 2 == 0, "width", self.width, "an even number with init disjoint_support")

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def hidden(self) -> int:
        return self.mlp_ratio * self.width


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with a warm-up and a cosine to the final rate."""

    learning_rate: float = option(1e-3, "peak learning rate", recompiles=True)
    final_learning_rate: float = option(1e-4, "learning rate at the end of the cosine", recompiles=True)
    warmup_steps: int | None = option(None, "linear warm-up; by default min(100, a tenth of the run)", recompiles=True)
    decay_steps: int | None = option(None, "steps until the final rate; by default the run's length", recompiles=True)
    weight_decay: float = option(0.1, "decoupled weight decay, on matrices only", recompiles=True)
    beta_1: float = option(0.9, "decay of the gradient's running mean", recompiles=True)
    beta_2: float = option(0.99, "decay of the squared gradient's running mean", recompiles=True)
    gradient_clip: float = option(1.0, "largest global norm of a seed's gradient", recompiles=True)

    def __post_init__(self) -> None:
        _require_number("learning_rate", self.learning_rate, positive=True)
        _require_number("final_learning_rate", self.final_learning_rate)
        _require(
            self.final_learning_rate <= self.learning_rate,
            "final_learning_rate", self.final_learning_rate, f"at most the learning rate, {self.learning_rate:g}",
        )  # fmt: skip
        _require_number("weight_decay", self.weight_decay)
        _require_number("beta_1", self.beta_1, below=1)
        _require_number("beta_2", self.beta_2, below=1)
        _require_number("gradient_clip", self.gradient_clip, positive=True)
        if self.warmup_steps is not None:
            _require_count("warmup_steps", self.warmup_steps, least=0)
        if self.decay_steps is not None:
            _require_count("decay_steps", self.decay_steps)


@dataclass(frozen=True)
class TrainingConfig:
    """How long, and how much at a time."""

    batch: int = option(16, "sequences a seed sees in one step", recompiles=True)
    epochs: int = option(4, "epochs; an epoch is a fixed number of steps")
    steps_per_epoch: int = option(40, "optimizer steps in an epoch")
    chunk: int = option(25, "most steps in one call of the compiled program", recompiles=True)

    def __post_init__(self) -> None:
        for name in ("batch", "epochs", "steps_per_epoch", "chunk"):
            _require_count(name, getattr(self, name))
        _require(
            self.steps <= MAXIMUM_COUNT, "epochs", self.epochs,
            f"at most {MAXIMUM_COUNT // self.steps_per_epoch} with {self.steps_per_epoch} steps each",
        )  # fmt: skip

    @property
    def steps(self) -> int:
        return self.epochs * self.steps_per_epoch

    @property
    def chunk_steps(self) -> int:
        """The longest chunk that divides an epoch, so that one program serves the whole run."""
        most = min(self.chunk, self.steps_per_epoch)
        return next(n for n in range(most, 0, -1) if self.steps_per_epoch % n == 0)


@dataclass(frozen=True)
class EvaluationConfig:
    """What is measured on, the same tokens for every seed, depth and arm."""

    probe_tokens: int = option(4096, "tokens of the validation split that the metrics see", recompiles=True)
    spectrum_sequences: int = option(16, "probe sequences that enter the QK^T spectra", recompiles=True)
    loss_tokens: int = option(4096, "tokens of each split that the reported losses see", recompiles=True)

    def __post_init__(self) -> None:
        for name in ("probe_tokens", "spectrum_sequences", "loss_tokens"):
            _require_count(name, getattr(self, name), most=MAXIMUM_PROBE)


@dataclass(frozen=True)
class CorpusConfig:
    """Which text, and how it becomes tokens."""

    corpus: str = option("builtin", "builtin, wikitext103, wikitext2, wikipedia-intros, a text file, or a folder")
    data_dir: str | None = option(None, "where a WikiText zip or its wiki.*.raw files lie")
    minimum_count: int = option(5, "characters rarer than this in the training split become the unknown symbol")

    def __post_init__(self) -> None:
        _require(isinstance(self.corpus, str) and self.corpus != "", "corpus", self.corpus, "a corpus name or a path")
        given = self.data_dir is None or isinstance(self.data_dir, str) and self.data_dir != ""
        _require(given, "data_dir", self.data_dir, "a path")
        _require_count("minimum_count", self.minimum_count)


@dataclass(frozen=True)
class InterventionConfig:
    """The numbers of the arms of Table 2. Each arm reads its own and no other."""

    period: int = option(100, "updates between two clamps or contractions", recompiles=True)
    start_epoch: int | None = option(
        None, "epochs before an arm acts; by default 1 for clamp and contraction, 3 for decouple, else 0",
        recompiles=True,
    )  # fmt: skip
    per_head: bool = option(False, "clamp, contract and rotate W_K per head instead of whole", recompiles=True)
    clamp_strength: float = option(1.0, "0 leaves the spectrum of W_K, 1 restores the initial one", recompiles=True)
    contraction_rank: float = option(
        32, "singular values of W_K that contraction leaves: a number, or below 1 a fraction of all", recompiles=True
    )
    contraction_factor: float = option(0.05, "what contraction multiplies the others by", recompiles=True)
    align_lambda: float = option(0.001, "strength of the alignment regulariser", recompiles=True)
    align_sign: int = option(1, "1 pulls columns of W_Q and W_K together, -1 apart", recompiles=True)

    def __post_init__(self) -> None:
        _require_count("period", self.period)
        if self.start_epoch is not None:
            _require_count("start_epoch", self.start_epoch, least=0)
        _require(isinstance(self.per_head, bool), "per_head", self.per_head, "true, false")
        _require_number("clamp_strength", self.clamp_strength)
        _require(self.clamp_strength <= 1, "clamp_strength", self.clamp_strength, "a number from 0 to 1")
        _require_number("contraction_rank", self.contraction_rank, positive=True)
        allowed = "a whole number of at least 1, or a fraction below 1"
        rank = self.contraction_rank
        _require(rank < 1 or rank == int(rank), "contraction_rank", rank, allowed)
        _require_number("contraction_factor", self.contraction_factor)
        _require_number("align_lambda", self.align_lambda)
        _require(self.align_sign in (1, -1), "align_sign", self.align_sign, "1, -1")


@dataclass(frozen=True)
class Config:
    """One group: a depth, an initialisation, an intervention, and the seeds that train together."""

    model: ModelConfig = ModelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    corpus: CorpusConfig = CorpusConfig()
    manipulation: InterventionConfig = InterventionConfig()
    intervention: str = "none"
    seeds: tuple[int, ...] = (7, 37, 42, 105)

    def __post_init__(self) -> None:
        _require(len(self.seeds) > 0, "seeds", self.seeds, "at least one seed")
        for seed in self.seeds:
            whole = isinstance(seed, int) and not isinstance(seed, bool)
            _require(whole and 0 <= seed <= MAXIMUM_SEED, "seeds", seed, f"whole numbers from 0 to {MAXIMUM_SEED}")
        _require(len(set(self.seeds)) == len(self.seeds), "seeds", self.seeds, "each seed once")
        self._check_size()
        self._check_intervention()

    def _check_size(self) -> None:
        model, batch = self.model, self.training.batch
        arrays = {
            "width": (model.width, model.width * max(model.hidden, model.vocabulary, model.context)),
            "batch": (batch, batch * model.context * max(model.hidden, model.vocabulary, model.heads * model.context)),
        }
        for field, (got, numbers) in arrays.items():
            allowed = f"what needs no array of {numbers:.2g} numbers, more than a device has"
            _require(numbers <= MAXIMUM_ARRAY, field, got, allowed)
        start = self.manipulation.start_epoch or 0
        most = MAXIMUM_COUNT // self.training.steps_per_epoch - 1
        _require(start <= most or start == 0, "start_epoch", start, f"a whole number of at most {most}")

    def _check_intervention(self) -> None:
        _require(isinstance(self.intervention, str), "intervention", self.intervention, "a name")
        file, _, own = self.intervention.rpartition(":")
        name, dose = split_dose(own)
        if file:
            known = file.endswith(".py") and own.isidentifier() and own not in INTERVENTIONS
        else:
            known = name in (INTERVENTIONS if dose is None else DOSES)
        doses = ", ".join(f"{arm}@DOSE" for arm in DOSES)
        allowed = f"{', '.join(INTERVENTIONS)}, {doses}, or FILE.py:name with another name"
        _require(known, "intervention", self.intervention, allowed)
        if dose is not None:
            try:
                number = float(dose)
            except ValueError:
                raise ValueError(f"intervention {self.intervention}: {dose!r} is no number") from None
            try:
                dataclasses.replace(self.manipulation, **{DOSES[name]: number})
            except ValueError as error:
                raise ValueError(f"intervention {self.intervention}: {error}") from None
            _require(f"{float(dose):g}" == dose, "intervention", self.intervention, f"{name}@{float(dose):g}")
        init = REQUIRED_INIT.get(name, self.model.init)
        _require(self.model.init == init, "init", self.model.init, f"{init} with intervention {name}")
        if name == "forced_k_contraction":
            rank = self.model.head_width if self.manipulation.per_head else self.model.width
            _require(
                self.manipulation.contraction_rank < rank, "contraction_rank", self.manipulation.contraction_rank,
                f"numbers below {rank}, the rank of W_K{' of a head' if self.manipulation.per_head else ''}",
            )  # fmt: skip

    @property
    def warmup_steps(self) -> int:
        stated = self.optimizer.warmup_steps
        return min(100, self.decay_steps // 10) if stated is None else stated

    @property
    def decay_steps(self) -> int:
        return self.optimizer.decay_steps or self.training.steps

    @property
    def name(self) -> str:
        """The group's folder."""
        return f"depth{self.model.depth}-{self.model.init}-{arm_name(self.intervention)}"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, nested as the dataclasses are."""
        return {**dataclasses.asdict(self), "seeds": list(self.seeds)}


# The parts of a `Config` that hold fields of their own, in the order in which their flags are listed.
PARTS: Mapping[str, type] = {
    "model": ModelConfig,
    "optimizer": OptimizerConfig,
    "training": TrainingConfig,
    "evaluation": EvaluationConfig,
    "corpus": CorpusConfig,
    "manipulation": InterventionConfig,
}


# Absent where results were written before the part existed: it then has its defaults.
LATER_PARTS = ("manipulation",)


def override(config: Config, **values: Any) -> Config:
    """`config` with named fields of its parts (``width=128``) or its own (``seeds=(1, 2)``) replaced.

    Raises:
      ValueError: a name that is no field, or a value that its dataclass refuses.
    """
    changes: dict[str, dict[str, Any]] = {}
    own: dict[str, Any] = {}
    for name, value in values.items():
        part = next((p for p, kind in PARTS.items() if name in kind.__dataclass_fields__), None)
        if part is not None:
            changes.setdefault(part, {})[name] = value
        elif name in ("intervention", "seeds"):
            own[name] = value
        else:
            raise ValueError(f"{name} is no field of the configuration")
    parts = {part: dataclasses.replace(getattr(config, part), **change) for part, change in changes.items()}
    return dataclasses.replace(config, **parts, **own)


def from_dict(values: Mapping[str, Any]) -> Config:
    """The inverse of `Config.to_dict`.

    Raises:
      ValueError: a part or a value is missing, or is not what its dataclass allows.
    """
    try:
        values = dict.fromkeys(LATER_PARTS, {}) | dict(values)
        parts = {part: kind(**values[part]) for part, kind in PARTS.items()}
        return Config(**parts, intervention=values["intervention"], seeds=tuple(values["seeds"]))
    except (AttributeError, KeyError, OverflowError, TypeError) as error:
        raise ValueError(f"it lacks a part, or has one of the wrong kind: {error!r}") from error


PRESETS: Mapping[str, Config] = {
    # Shows the machinery in minutes on two cores; too short for queries and keys to part.
    "quick": Config(),
    # 2 million characters a run: 1,000 steps, past the point where queries and keys part.
    "laptop": override(
        Config(), width=128, heads=2, context=128, batch=16, epochs=8, steps_per_epoch=125, loss_tokens=8192
    ),
    # The paper's study as far as it is documented; uncalibrated where the paper is silent.
    "paper": override(
        Config(), width=256, heads=4, context=256, batch=64, epochs=10, steps_per_epoch=500,
        corpus="wikitext103", loss_tokens=131072,
    ),  # fmt: skip
}
