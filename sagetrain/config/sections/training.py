"""The sections of the YAML about the run itself: its ranks, its folder, its checkpoints, its logs."""

from __future__ import annotations

from typing import Annotated, Literal, Union

from pydantic import Field, NonNegativeInt, PositiveInt

from sagetrain.config.sections.base import FolderOrUrl, LocalPath, Name, Section, StoreUrl

_Ranks = Annotated[int, Field(gt=0, le=1_000_000)]
Recomputation = Union[Literal["none", "selective", "attention", "full"], NonNegativeInt]
"""The activations that the backward pass recomputes: see TrainingConfig.activation_checkpointing."""


class ParallelConfig(Section):
    """The layout: the spread of the model and the optimizer state over the ranks."""

    world_size: _Ranks | None = None
    """Number of ranks (GPUs) of the run. A launch with more or fewer is an error, for instance when a host did not
    start. Default: any number."""
    tensor_parallel_size: _Ranks = 1
    """Ranks that share one copy of the model (Megatron tensor parallelism); ranks of one group are neighbours."""
    context_parallel_size: _Ranks = 1
    """Ranks that share every sequence (Ulysses context parallelism), for long sequences. Each rank holds a slice of the
    tokens; in attention each rank holds whole sequences for a share of the heads. It divides the query heads of a
    tensor-parallel rank. If it is more than the key/value heads of that rank, it is a multiple of them, and several
    ranks have copies of the same key/value head. If it is more than the query heads of that rank, the ranks beyond
    gather keys and values."""
    pipeline_parallel_size: _Ranks = 1
    """Number of pipeline stages. Each stage has some of the blocks, and micro-batches go from stage to stage, in the
    order 1F1B. The first stage has the embedding, the last one the output projection. Needs a zero_stage of 0 to 2, and
    not engine deepspeed."""
    expert_parallel_size: _Ranks = 1
    """Neighbouring ranks that have the experts of a layer between them (model.experts). Up to per_token of these ranks
    gather the tokens of all of them before the experts, and add up the results behind. More ranks send each token to
    the ranks of its experts. Other tensors stay as they are."""
    expert_room: Annotated[float, Field(ge=1)] = 1.5
    """Memory for the rows of experts that a rank receives with expert_parallel_size, in multiples of the mean over
    ranks. A step in which they do not fit is taken again with twice the room, and its results are the same."""
    pipeline_chunks: PositiveInt = 1
    """Number of ranges of blocks that each pipeline stage has (interleaved 1F1B). With several chunks the stages idle
    less and send more."""
    pipeline_blocks: Literal["auto"] | list[PositiveInt] = "auto"
    """Number of blocks in each chunk, from the first to the last: pipeline_parallel_size x pipeline_chunks numbers.
    auto: equal work for all chunks, with the embedding and the output projection counted."""
    sequence_parallel: bool = False
    """Shard norms and residual stream along the sequence inside a tensor-parallel group."""
    tensor_parallel_overlap: Literal["auto", "on", "off"] = "auto"
    """Split a micro-batch into two halves, so that the tensor-parallel collectives of each half run beside the matmuls
    of the other. This launches twice as many kernels, each over half of the tokens. auto: the faster way for a few
    blocks of this model on these GPUs, timed when the run begins and kept when the run continues in the same layout.
    Blocks of less than 3 TFLOP of matmuls a rank and micro-batch are not timed and go whole."""
    engine: Literal["auto", "deepspeed", "fsdp"] = "auto"
    """The library that shards weights, gradients and optimizer state: DeepSpeed's ZeRO, or torch's FSDP2
    (`fully_shard`). Any launcher starts both, and a checkpoint of one continues in the other. auto: fsdp, or deepspeed
    where gradient_reduction is bf16, which only DeepSpeed has. A run that continues
    keeps the engine that `auto` was when it began."""
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 1
    """ZeRO stage over data- and context-parallel ranks. 3 is by fsdp alone. Under deepspeed bf16 runs 0 as 1:
    DeepSpeed's bf16 stage 0 is wrong."""
    shard_size: _Ranks | None = None
    """Number of neighbouring data- and context-parallel ranks that shard the model between them at zero_stage 1 to 3
    (hybrid sharding). The other ranks hold copies of these shards, and only gradients travel between copies: the GPUs
    of a host, for instance, where links between hosts are slow. Not with engine deepspeed. Default: all shard."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """State that a rank keeps in the host's memory, so that it takes none of the GPU's. optimizer: master weights,
    gradients that are reduced, and moments; the CPU makes the update. It needs zero_stage 1 or 2. all: the weights as
    well, which every pass copies to the GPU, block by block. It needs zero_stage 3. Both need AdamW, about
    30 bytes of host memory for each parameter that a rank owns (`sagetrain plan` says how much), and not engine
    deepspeed."""
    gradient_reduction: Literal["fp32", "bf16"] = "fp32"
    """Precision in which gradients travel between data- and context-parallel ranks and are summed over them. bf16 takes
    half the bytes; every sum over ranks is rounded to 8 bits of mantissa, so losses differ. Sums over the micro-batches
    of a rank are in fp32 either way. bf16 needs training.dtype bf16, and makes engine auto deepspeed."""


class TrainingConfig(Section):
    """The run itself."""

    run_dir: LocalPath
    """Folder of everything the run writes: checkpoints, metrics.jsonl, TensorBoard, resolved configuration."""
    run_url: StoreUrl | None = None
    """Folder in a bucket (s3://BUCKET/FOLDER, extra s3; gs://BUCKET/FOLDER, extra gs) in which the run keeps its
    checkpoints, in place of run_dir/checkpoints. file:///FOLDER writes a folder in the same way. Default: none."""
    total_tokens: PositiveInt
    """Tokens to train on."""
    init_from: FolderOrUrl | None = None
    """Start with the weights of another run, or of one of its checkpoints: its path, or its URL in a store. Everything
    else is new: data, seq_length, rope_theta, schedules. Model and tokenizer must be the same. Once this run has a
    checkpoint, it continues from that.
    """
    init_moments: bool = False
    """Take over the optimizer's moments as well as the weights. Needs init_from, and a run with the same optimizer."""
    seed: NonNegativeInt = 0
    """Seed of initialization and sample order."""
    perturb: NonNegativeInt = 0
    """Begin with weights that differ in one rounding: the norm gain of this channel (the first is 1) in the first block
    (under conventions gemma 1 + gain) becomes the next larger number. 0: no gain does. If the key is changed at a
    resume, the change is made there. Runs that differ in this key alone show how far rounding drives equal runs apart,
    on deterministic machines too (`sagetrain compare --band`)."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Arithmetic of the model. Master weights and moments are fp32 in either case, unless optimizer.master or
    optimizer.moments says otherwise."""
    activation_checkpointing: Union[Recomputation, Literal["auto"]] = "none"
    """Activations that the backward pass recomputes instead of keeping them. full: every block as a whole.
    selective: norms, rotary embedding, SwiGLU and collectives, which are cheap; the outputs of matmuls and of
    attention are kept. attention: all but attention, whose results are kept, for long sequences. A number: that many
    blocks, from the first on, as wholes. auto: none, selective or wholes, the least that fits into the GPU's memory by
    the estimate of `sagetrain plan`; none without a GPU."""
    activation_offload: bool = False
    """Have what blocks keep for the backward pass in the host's memory meanwhile, for sequences that are too long for
    the GPU's. It leaves and comes back beside the kernels of other blocks, and no bit changes. Needs
    activation_checkpointing full or attention and engine fsdp, without pipelines, experts and parallel.offload.
    `sagetrain plan` says how much memory of the host it takes."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile the blocks with torch.compile; auto: on with a GPU. At ZeRO 3 the weights of a compiled block are
    gathered together."""
    cuda_graphs: Literal["auto", "on", "off"] = "auto"
    """Record the forward and the backward pass of a micro-step as a CUDA graph, and replay it for other micro-batches.
    The host then launches a micro-step at once, where it would need longer than the GPU for a short sequence. The bits
    are the same. Recordings keep the memory of a micro-step's activations for themselves. They need engine fsdp without
    parallel.offload and activation_offload; from zero_stage 2 on also no pipeline parallelism, no parallel.shard_size
    and no experts that ranks have between them, and at 3 no experts at all. auto: where that is so, the memory is
    there, and replays are as fast as the host by the times of both in the first steps; not with a loss of your own, or
    for a single replica at zero_stage 3. on: untimed, with these too, and an error where it is not possible."""
    drop_steps: list[PositiveInt] = []
    """Steps (the first is 1) whose samples are skipped without an update, where a run cannot get past a step, because
    of a loss that is not finite for instance. The sample ledger of every later checkpoint records them."""
    timeout_minutes: Annotated[float, Field(ge=0.1, le=43_200)] = 30.0
    """Longest time that a step, evaluation or save may be without progress before the run is ended as hung."""
    restarts: NonNegativeInt = 0
    """Number of times that the ranks may begin again by themselves, from the newest checkpoint, when one of them has
    died: by a signal (kill -9, the kernel), by an exception, by a hang, or once by a lack of memory. The process that a
    launcher starts is then a keeper, which has imported everything and forks its rank. Mistakes, full disks, and losses
    that are not finite end the run at once, and so does a death that comes again at the same place. Where torchrun has
    --max-restarts, a host that is lost or has two deaths is left out (docs/failures.md). Of the command
    `sagetrain train` alone, on Linux."""
    network_interface: Name | None = None
    """Network interface (eth0, ib0) for traffic between ranks. NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME are set to it.
    May differ between hosts. Default: the libraries' own choice."""


class EvaluationConfig(Section):
    """Loss on held-out data, downstream tasks, and samples of text, while training; also run once at the end."""

    every_tokens: PositiveInt | None = None
    """Tokens between evaluations. Default: a tenth of training.total_tokens."""
    num_sequences: PositiveInt = 64
    """Sequences of one evaluation, the same ones each time."""
    tasks: list[str] = []
    """Tasks of the lm-evaluation-harness (extra lm-eval), by name or as YAML files. The metrics are
    eval/<task>/<metric>. Tasks that want generated text do not run where weights are sharded (zero_stage 3)."""
    tasks_every_tokens: PositiveInt | None = None
    """Tokens between two evaluations of the tasks. Default: a tenth of training.total_tokens."""
    tasks_limit: PositiveInt | None = None
    """Documents of each task. Default: all."""
    samples_every_tokens: PositiveInt | None = None
    """Tokens between two samples, which are texts that the model writes while it trains. They go to samples.jsonl of
    the run folder, TensorBoard and `sagetrain report`. Not where weights are sharded (zero_stage 3). Default: none."""
    samples_prompts: Annotated[list[str], Field(min_length=1)] = [""]
    """Texts that samples continue; an empty one is the beginning of a document."""
    samples_tokens: PositiveInt = 64
    """Largest number of tokens of each sample."""


class CheckpointConfig(Section):
    """The times at which checkpoints are written, and the number that is kept (under training.run_dir/checkpoints or
    training.run_url/checkpoints).

    Training stands still only while its state is copied to host memory, which takes 12 bytes for each parameter of a
    rank's share. Training goes on while the copy is written. A checkpoint counts once it is wholly on disk,
    or in the bucket.
    """

    every_tokens: PositiveInt | None = None
    """Tokens between checkpoints. Default: a tenth of training.total_tokens. One is always written at the end."""
    keep_last: PositiveInt = 2
    """Number of newest checkpoints to keep."""
    keep_every_tokens: PositiveInt | None = None
    """Also keep for good the first checkpoint at or past each multiple of this many tokens."""
    tolerate_minutes: Annotated[float, Field(ge=0, le=43_200)] = 0.0
    """Minutes for which training goes on while a checkpoint cannot be written, because the disk is full, a quota is
    used up or a file server is away. The same checkpoint is tried again and again meanwhile, and rows of numbers wait
    in memory. Afterwards the run ends as with 0: within a step, with exit code 3."""
    in_memory_every: PositiveInt | None = None
    """Optimizer steps between two copies of the state in the memory of its host (/dev/shm) and of another host. Ranks
    that begin again after a death continue from there, if it is newer than the newest checkpoint. Each host takes 48
    bytes for each parameter of its ranks' shares, with one host 24. Default: none."""
    resume: Literal["auto", "never"] = "auto"
    """auto: continue from the newest whole checkpoint of run_dir. never: refuse to start in a run_dir that has one."""
    new_optimizer: bool = False
    """Continue from a checkpoint of a run with another optimizer, whose moments then begin anew. Otherwise that is an
    error. Once the run has a checkpoint with its own optimizer, the key changes nothing."""


class WandbConfig(Section):
    """Weights & Biases gets the numbers of metrics.jsonl. Each run folder is one run there, resumes included."""

    project: Annotated[str, Field(min_length=1)]
    """Name of the project at Weights & Biases."""
    entity: str | None = None
    """Team or user. Default: the one of the login."""
    name: str | None = None
    """Name that is shown there. Default: the last folder of training.run_dir."""
    mode: Literal["online", "offline"] = "online"
    """offline: write into run_dir/wandb alone, without a network; `wandb sync` uploads it later."""


class LoggingConfig(Section):
    """The places that metrics are written to, and how often."""

    every_steps: PositiveInt = 1
    """Optimizer steps between two lines of metrics.jsonl and between two updates of the progress bar. The step of a
    checkpoint has a line too."""
    tensorboard: bool = True
    """Write TensorBoard events into run_dir/tensorboard."""
    layer_norms_every_steps: PositiveInt | None = None
    """Steps between two measurements of norms/<block>/gradient, the norm of each block's gradient (also of the
    embedding and the head), and of norms/<block>/activation, the root mean square of each block's output. Default:
    none."""
    wandb: WandbConfig | None = None
    """Track the run with Weights & Biases as well (pip install 'sagetrain[wandb]'). Default: no."""


class ProfileConfig(Section):
    """A window of steps that torch's profiler traces, to show where the time goes. Traced steps take longer than
    others."""

    from_step: PositiveInt
    """First traced step (the run's first is 1). A resume that begins after it traces what is left of the window."""
    steps: PositiveInt = 3
    """Number of traced steps. The trace of one step takes from a few MB to a few hundred."""
    all_ranks: bool = False
    """Trace every rank instead of rank 0 alone."""


class GuidanceConfig(Section):
    """The stability rules of the SageBwd papers."""

    override: list[str] = []
    """Names of rules whose finding is accepted for this run. They are recorded in the run folder and in every
    checkpoint."""
