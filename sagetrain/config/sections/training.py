"""The run: its ranks, its folder, its checkpoints, its logs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from sagetrain.config.sections.base import LocalPath, Name, Section


class ParallelConfig(Section):
    """How the model and the optimizer state spread over the ranks."""

    world_size: PositiveInt | None = None
    """Ranks (GPUs) of the run: a launch with more or fewer is an error, as where a host did not start. Default: any."""
    tensor_parallel_size: PositiveInt = 1
    """Ranks that share one copy of the model (Megatron tensor parallelism); ranks of one group are neighbours."""
    context_parallel_size: PositiveInt = 1
    """Ranks that share every sequence (Ulysses context parallelism), for long ones: each holds a slice of its tokens,
    and in attention whole sequences with a share of the heads."""
    sequence_parallel: bool = False
    """Shard norms and residual stream along the sequence inside a tensor-parallel group."""
    tensor_parallel_overlap: Literal["auto", "on", "off"] = "auto"
    """Take the tokens of a micro-batch in two halves, so that the tensor-parallel collectives of each run beside the
    matmuls of the other. That launches twice as many kernels, each over half of the tokens. auto: whichever is faster
    for a few blocks of this model on these GPUs, timed when the run begins and kept when it continues in its layout."""
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 1
    """DeepSpeed ZeRO stage over data- and context-parallel ranks. bf16 runs 0 as 1: DeepSpeed's bf16 stage 0 is wrong.
    """
    gradient_reduction: Literal["fp32", "bf16"] = "fp32"
    """In what gradients travel between data- and context-parallel ranks and are summed over them. bf16 is half the
    bytes; every sum over ranks is rounded to 8 bits of mantissa, so losses differ. Sums over the micro-batches of a
    rank are in fp32 either way. Needs training.dtype bf16."""


class TrainingConfig(Section):
    """The run itself."""

    run_dir: LocalPath
    """Folder of everything the run writes: checkpoints, metrics.jsonl, TensorBoard, resolved configuration."""
    total_tokens: PositiveInt
    """Tokens to train on."""
    init_from: LocalPath | None = None
    """Start with the weights of another run, or of one of its checkpoints, and all else new: data, seq_length,
    rope_theta, schedules. Model and tokenizer must be the same. Once this run has a checkpoint it goes on from that."""
    init_moments: bool = False
    """Take over the moments of AdamW too, with init_from."""
    seed: NonNegativeInt = 0
    """Seed of initialization and sample order."""
    perturb: NonNegativeInt = 0
    """Begin with weights that differ in one rounding: the gain of this channel (the first is 1) of the first block's
    norm becomes the next number above. 0: none does. Changed at a resume, it is done there. Runs that differ in it
    alone show how far apart rounding takes equal runs, on deterministic machines too (`sagetrain compare --band`)."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Arithmetic of the model; master weights and optimizer state are fp32 in either case."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """What the backward pass computes again instead of keeping it: all of every block (full), or what is cheap
    (selective: norms, rotary embedding, SwiGLU, collectives; the results of matmuls and of attention are kept)."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile of the blocks; auto: on with a GPU. At ZeRO 3 a compiled block's weights are gathered together."""
    drop_steps: list[PositiveInt] = []
    """Steps (the first is 1) whose samples are passed over without an update, where a run cannot get past one: a loss
    that is not finite, say. The ledger of every later checkpoint records them."""
    timeout_minutes: Annotated[float, Field(ge=0.1, le=43_200)] = 30.0
    """How long a step, evaluation or save may be without progress before the run is ended as hung."""
    network_interface: Name | None = None
    """Interface (eth0, ib0) that traffic between ranks binds to: NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME are set to
    it. May differ between hosts. Default: the libraries' own choice."""


class EvaluationConfig(Section):
    """Loss on held-out data, downstream tasks, and samples of text, while training; also run once at the end."""

    every_tokens: PositiveInt | None = None
    """Tokens between evaluations. Default: a tenth of training.total_tokens."""
    num_sequences: PositiveInt = 64
    """Sequences of one evaluation, the same ones each time."""
    tasks: list[str] = []
    """Tasks of the lm-evaluation-harness (extra lm-eval), by its names or as YAML files: eval/<task>/<metric> in the
    metrics. Those that want generated text not at zero_stage 3."""
    tasks_every_tokens: PositiveInt | None = None
    """Tokens from one time that the tasks are asked to the next. Default: a tenth of training.total_tokens."""
    tasks_limit: PositiveInt | None = None
    """Documents of each task. Default: all."""
    samples_every_tokens: PositiveInt | None = None
    """Tokens between samples, texts that the model writes while it trains: in samples.jsonl of the run folder,
    TensorBoard and `sagetrain report`. Not at zero_stage 3. Default: none."""
    samples_prompts: Annotated[list[str], Field(min_length=1)] = [""]
    """Texts that samples continue; an empty one is the beginning of a document."""
    samples_tokens: PositiveInt = 64
    """Tokens of each sample, at most."""


class CheckpointConfig(Section):
    """When checkpoints are written and which are kept (under training.run_dir/checkpoints).

    Training stands still only while its state is copied to host memory, which takes 12 bytes per parameter of a rank's
    share; it goes on while that is written, and a checkpoint counts once it is wholly on disk.
    """

    every_tokens: PositiveInt | None = None
    """Tokens between checkpoints. Default: a tenth of training.total_tokens. One is always written at the end."""
    keep_last: PositiveInt = 2
    """How many of the newest checkpoints to keep."""
    keep_every_tokens: PositiveInt | None = None
    """Also keep for good the first checkpoint at or past each multiple of this many tokens."""
    resume: Literal["auto", "never"] = "auto"
    """auto: continue from the newest whole checkpoint of run_dir. never: refuse to start in a run_dir that has one."""


class WandbConfig(Section):
    """Weights & Biases: the numbers of metrics.jsonl, in one run there for each run folder, resumes included."""

    project: Annotated[str, Field(min_length=1)]
    """Project there."""
    entity: str | None = None
    """Team or user. Default: that of the login."""
    name: str | None = None
    """Name shown there. Default: the last folder of training.run_dir."""
    mode: Literal["online", "offline"] = "online"
    """offline: write into run_dir/wandb alone, without a network; `wandb sync` uploads it later."""


class LoggingConfig(Section):
    """Where metrics go."""

    every_steps: PositiveInt = 1
    """Optimizer steps between two lines of metrics.jsonl and the progress bar; the step of a checkpoint has one too."""
    tensorboard: bool = True
    """Write TensorBoard events into run_dir/tensorboard."""
    layer_norms_every_steps: PositiveInt | None = None
    """Steps between two measurements of norms/<block>/gradient, the norm of the step's gradient of each block (also of
    embedding and head), and norms/<block>/activation, the root mean square of what each block puts out. Default: none.
    """
    wandb: WandbConfig | None = None
    """Track the run with Weights & Biases as well (pip install 'sagetrain[wandb]'). Default: not."""


class ProfileConfig(Section):
    """Steps that torch's profiler watches: where the time goes. They take longer than others."""

    from_step: PositiveInt
    """First of them (the run's first is 1). A resume that begins after it takes what is left of the window."""
    steps: PositiveInt = 3
    """How many. A trace of one takes some MB to some hundred."""
    all_ranks: bool = False
    """Trace every rank, not rank 0 alone."""


class GuidanceConfig(Section):
    """The stability rules of the SageBwd papers."""

    override: list[str] = []
    """Names of rules whose finding is accepted for this run; recorded in the run folder and in every checkpoint."""
