"""The parts of a job's configuration that actors need: typed, strict, importable without torch.

``coordinator.job`` composes them, reads them from YAML and applies ``key.path=value`` overrides.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every section: unknown keys and wrong types are errors that name their path."""


class AgentSettings(Settings, frozen=True):
    """How agents are played that speak OpenAI's API (``actors.env.agents``)."""

    host: str = "127.0.0.1"  # where their endpoint listens; it is plain HTTP, for whoever can reach it and has a key
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0  # 0 is any
    timeout_s: float = 600.0  # deadline of one session, from its start to the agent's result
    tool_calls: Literal["hermes", "line"] = "hermes"  # how the policy writes them (actors.env.agents.tool_calls)
    guests: int = 0  # sessions at once that no ticket starts, of whoever has the token (actors.env.agents.guests)
    guest_idle_s: float = 600.0  # one of them ends when nothing was asked of it for so long
    ignore: tuple[str, ...] = ()  # parameters that agents may send and that then change nothing, such as temperature


class EnvironmentSettings(Settings, frozen=True):
    """Where trajectories happen."""

    name: str = "frozenlake"  # a name of the catalogue, or "module:Class" by import path (relative to the job file)
    options: dict[str, Any] = {}  # keyword arguments of the environment's constructor
    max_turns: int = 20  # step bound; a trajectory that reaches it ends there
    workers: int | Literal["auto"] = "auto"  # processes that run environment code
    concurrent: int | Literal["auto"] = "auto"  # trajectories running at once
    step_timeout_s: float = 30.0  # deadline of one reset or step
    agent: AgentSettings | None = None  # set: ``name`` is an agent that asks an endpoint, and turns are what it asks


class RewardSettings(Settings, frozen=True):
    """How a finished trajectory is scored."""

    function: str = "environment"  # "environment" (the return) or "module:function" by import path
    timeout_s: float = 30.0
    workers: int = 1  # processes that run a user's reward function; none are started for "environment"


class SplitSettings(Settings, frozen=True):
    """Prompts are computed on some hardware classes, and decoded on the others (vllm)."""

    prefill: list[str]  # classes whose engines compute prompts for the others
    min_tokens: int = 256  # that the engine which decodes would have to compute otherwise; shorter ones go there whole


class RolloutSettings(Settings, frozen=True):
    """How actions are sampled."""

    # auto: vllm where it is installed; openai and sglang are servers that somebody else has started
    engine: Literal["auto", "torch", "vllm", "openai", "sglang"] = "auto"
    servers: list[str] = []  # their URLs, an engine each: http://HOST:8000/v1 (openai), http://HOST:30000 (sglang)
    server_key: str | None = None  # environment variable that has the key which they want
    proxies: int = 1  # how many, each with its own engines, a run of separate processes waits for to begin
    engines: int | Literal["auto"] = "auto"  # engine processes of each proxy
    threads: int | Literal["auto"] = "auto"  # CPU threads of one engine
    tensor_parallel: int = 1  # devices that share one engine's weights (vllm)
    split: SplitSettings | None = None  # default: each request whole to one engine
    cuda_graphs: bool = True  # vllm on a GPU: replay recorded kernels instead of launching each
    temperature: float = 1.0
    max_tokens_per_turn: int = 1
    max_sequences: int | Literal["auto"] = "auto"  # of one engine's running batch
    max_model_len: int | Literal["auto"] = "auto"  # auto: what the environment and the policy need
    turn_timeout_s: float = 120.0  # deadline of one generation
    affinity: dict[str, str] = {}  # stream, environment or "default" -> hardware class
    # who says which class plays what: the user, the cost that is measured, or a language model checked against that
    mapping: Literal["declared", "learned", "advised"] = "declared"
    load_every_s: float = 1.0  # how often an engine says how loaded it is
    tokens_every_s: float = 1.0  # how often it says what running requests have sampled: a death costs them no more
    progress_timeout_s: float = 90.0  # an engine that computes nothing for so long, with work, hangs and is killed
    engine_restarts: int = 1  # of one engine that died; after that it is removed
    engine_restarts_within_s: float = 1e9  # over so long a time they are counted: by default, a whole run
    hot_spots: bool = True  # whether trajectories move from engines that are too busy to others that have room


class SftSettings(Settings, frozen=True):
    """How ``bin/sft`` imitates demonstrations; the rest of a step is as ``train`` says."""

    data: str | None = None  # a dump, a run that has recorded, or chats as JSONL (relative to the job file)
    select: Literal["all", "successful"] = "all"  # which recorded trajectories are imitated
    top_return: float = 1.0  # of those, the share with the highest return
    held_out: float = 0.1  # share of the demonstrations that is only measured on
    epochs: int = 3
    batch_size: int = 32  # demonstrations of one step
    learning_rate: float = 1e-3
    warmup_steps: int = 0
    evaluate_every: int = 10  # steps between two measurements of the held-out loss; it is measured at the end, too


AlgorithmName = Literal[
    "ppo", "grpo", "dr_grpo", "rloo", "reinforce_pp", "dapo", "gspo", "cispo", "sapo", "topr", "gigpo", "distillation"
]
"""A preset of ``actors.trainer.algorithms.presets``."""
Estimator = Literal["grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gae", "gigpo", "distillation"]
PolicyLoss = Literal["clip", "gspo", "cispo", "sapo", "topr", "reinforce"]
Correction = Literal["none", "decoupled", "tis", "icepop", "sequence_tis", "sequence_mask"]
Aggregation = Literal["token", "sequence", "constant"]


class TrainSettings(Settings, frozen=True):
    """What a step of training is."""

    backend: Literal["torch", "megatron"] = "torch"
    # How megatron's ranks share a model and a batch: tensor x pipeline x data; see ``docs/trainer.md``.
    tensor_parallel: int = 1  # ranks that share each matrix
    pipeline_parallel: int = 1  # stages of layers, each on ranks of its own
    virtual_pipeline: int = 1  # chunks of layers of one stage, of the interleaved schedule
    data_parallel: int = 1  # replicas, each with trajectories of its own
    sequence_parallel: bool = False  # what lies between the shared matrices is cut by position
    distributed_optimizer: bool = False  # replicas share masters and moments
    threads: int | Literal["auto"] = "auto"  # CPU threads of one rank
    steps: int = 60
    groups_per_step: int = 8  # B of the design, in groups
    group_size: int = 8
    algorithm: AlgorithmName = "grpo"
    algorithms: dict[str, AlgorithmName] = {}  # stream of ``scheduling.mix`` -> another one for its tasks
    learning_rate: float = 1e-3
    warmup_steps: int = 0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.99
    adam_epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 2.0  # of a gradient that is not shortened, in the first step; it then falls evenly ...
    final_grad_norm: float = 1.0  # ... to this
    grad_norm_steps: int | Literal["auto"] = "auto"  # ... over so many steps; auto: all of them
    entropy_bonus: float = 0.0
    micro_batch_tokens: int = 8192  # computed tokens of one forward pass: padding counts, a shared prefix once
    record: bool = False  # keep what every step is made of, to train on, imitate or replay it later
    step_timeout_s: float = 600.0
    reference: str | None = None  # "initial", the weights that the run began with, or a model directory: what KL and
    # distillation compare with; torch backend
    critic: str = "initial"  # likewise: what the critic of ppo begins as
    critic_rate: float = 1.0  # its learning rate, in learning rates of the policy
    recompute_versions: int = 0  # so many versions of the weights are kept: what was sampled under them is scored under
    # them by the trainer, and the engines' own log-probabilities are not trained on; 0 is none
    length: int | Literal["auto"] = "auto"  # most tokens that a trajectory may sample; auto: turns x tokens per turn

    # Parts of the algorithm, each instead of what the preset says (null); see ``actors.trainer.algorithms.algorithm``.
    estimator: Estimator | None = None
    loss: PolicyLoss | None = None
    correction: Correction | None = None
    aggregation: Aggregation | None = None
    scale_advantages: bool | None = None
    advantage_epsilon: float | None = None
    clip_low: float | None = None
    clip_high: float | None = None
    tis_cap: float | None = None
    mask_low: float | None = None
    mask_high: float | None = None
    off_policy_kl: float | None = None
    sapo_positive: float | None = None
    sapo_negative: float | None = None
    gamma: float | None = None
    gae_lambda: float | None = None
    step_weight: float | None = None
    kl: Literal["k1", "k2", "k3"] | None = None
    kl_coefficient: float | None = None
    overlong_share: float | None = None
    overlong_penalty: float | None = None
    dynamic_sampling: bool | None = None

    @property
    def ranks(self) -> int:
        """Trainer processes."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel
