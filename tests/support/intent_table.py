"""What is said where a parameter or an option has no effect: a row for each that is public.

A row is ``names | answer | when it has no effect, and what is said``. ``intent_cases.py`` has a case for each name whose
answer is not ``hint``, and test_intent_table.py provokes it. A name that is answered in two ways has two rows. The answers:

    error    it is refused
    warning  a T5CkptWarning, once for its cause
    report   a log line, or a field of what is returned or printed
    hint     no word is needed, for the reason given. Where the reason says what happens, ``intent_cases.HINTS`` shows it.
"""

from __future__ import annotations

import collections.abc
import importlib
import inspect
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import click

import t5ckpt
from t5ckpt.cli import VERBS as VERB_MODULES
from t5ckpt.cli.app import app
from t5ckpt.storage.options import BY_SCHEME

# The same wherever they are taken, with one answer each. Everything else has a row of its own below.
COMMON = """
path ckpt_dir source a b path_or_dir | error | nothing is there
target | error | it is there already
checkpoints_dir | hint | a run that begins there: it has no steps yet
step | error | there is no such step, or the path names one already
storage_options | error | a key that the scheme lacks, or that another one switches off
progress | hint | a wish to be told; nothing is called where no byte moves
train_state state state_dict | error | a leaf that is none
options | error | by its fields, which have rows of their own
infos moment | hint | the library passes them
key default | hint | as in a Mapping
dry_run overwrite force | hint | the wish that holds anyway where there is nothing to write or to replace
"""

PYTHON = {
    'CheckpointTranslator.add': 'pattern | hint | a rule for names that may come',
    'CheckpointTranslator.apply': 'flatdict | error | a name without a rule\nopts | hint | for the rules, which take them or not',
    'CheckpointTranslator.translate': 'flatdict | error | a name without a rule\nopts | hint | for the rules',
    'CheckpointView.report': """
output | error | it exists
sample_bytes | error | below 1; a larger one than the checkpoint reads all
""",
    'CheckpointView.select': 'pattern | error | it matches nothing',
    'CheckpointView.stats': 'bins | hint | leaves without a number have no histogram',
    'Checkpointer': """
train_state | warning | it names no sharding for leaves of several devices: UnshardedTemplateWarning
partitioner | hint | one process and one device place everything alike
dataset_iterator | error | it cannot return its position
dataset_iterator | report | the checkpoint has no position: logged at restore
keep | error | with keep_policy
keep_policy | report | a pin, a reader or another layout keeps a step; a metric that does not come: MissingMetricWarning
save_dtype restore_dtype | error | no floating leaf is meant
keep_dataset_checkpoints | warning | there is no iterator
metric_source | warning | no policy looks at a metric
save_policy | warning | at close, when steps were saved and it was not asked
preempted | warning | the same; a PreemptionNotice that was not entered
read_only | hint | a program that never saves
local | error | its directory is in use, of another run, on a bucket, or in the run's directory
save_policy | error | SaveOnPreemption without preempted
use_gda | warning | always
""",
    'CheckpointerOptions': """
map_positions | error | there is no iterator
cast_leaves | error | without a dtype, or it matches nothing
restore_concurrent_gb chunk_bytes inline_bytes | hint | limits; larger than what there is
compression | error | unknown; 'auto' may choose none
reuse_unchanged | hint | the default; storage without links
mmap follow_links | warning | at restore, not on a local file system
mmap | hint | a view and a load read what they cannot map
clock | hint | time.time by default
share_replicated processes process_timeout | hint | one process: the same program runs on 1..N
verify | error | unknown word; 'auto' is documented
strict_save | hint | a state that fits, or a save with transforms, which is not checked (documented)
""",
    'Checkpointer.best_step': 'metric mode | error | no policy says which, or no step has it and some have others',
    'Checkpointer.convert_from_tf_checkpoint': """
state_transformation_fns | error | as in save
concurrent_gb | hint | a limit
translator | error | a name without a rule
""",
    'Checkpointer.maybe_save': """
step | warning | the state is at another: StepMismatchWarning
state_transformation_fns | hint | nothing is due
metrics | warning | the policy looks at others
custom_metadata | hint | nothing is due
""",
    'Checkpointer.reached_preemption': 'step | hint | the answer is the same in all processes',
    'Checkpointer.restore': """
step path | error | both, or not there
state_transformation_fns | error | what they return does not fit
fallback_state | warning | a leaf that the template lacks
lazy_parameters | error | with a partitioner that puts parameters on devices
strict | error | unknown word
strict | report | leaves that it leaves out are logged
donate | warning | the template holds no jax.Array
restore_iterator | hint | False without an iterator
take leave rename resize | error | a pattern matches nothing
missing | error | unknown word
resize | report | each leaf that is resized is logged
""",
    'Checkpointer.restore_from_tf_checkpoint': """
strict | error | what it lacks
translator | error | a name without a rule
""",
    'Checkpointer.save': """
state_transformation_fns | error | what they return does not fit
concurrent_gb | hint | a limit
step | warning | the state is at another: StepMismatchWarning
metrics | warning | the keep policy looks at others; no policy: they are kept for people
overwrite | error | the step is pinned; hint where there is nothing to replace
custom_metadata | report | the step is there already: skipped, which is logged
""",
    'Checkpointer.save_async': """
state_transformation_fns overwrite | error | as save
step metrics | warning | as save
custom_metadata | report | as save
concurrent_gb | hint | a limit
""",
    'Checkpointer.should_save': 'step metrics | error | there is no save policy',
    'ConvertOptions': """
save_dtype cast_leaves | error | meant for no floating leaf; without a dtype
compression concurrent_gb max_shard_bytes scanned split_heads translator like | error | with a format that it is not for
config | error | it does not fit the weights
take leave rename | error | a pattern matches nothing
trust_files | warning | no list of checksums is lost
follow_links | warning | the source is not on a local file system
""",
    'KeepBest': """
count metric mode period | error | out of range
metric | warning | it does not come: MissingMetricWarning
mode | warning | the default, with a metric such as a loss: MetricModeWarning
keep_without_metric | hint | every step has it
""",
    'KeepEvery': 'steps | error | below 1; a period that no step meets keeps the latest',
    'KeepEveryHours': 'hours | error | not above 0',
    'KeepLatest': 'count | error | below 1',
    'KeepSteps': 'steps | hint | a step that may still come; of a run as it is, t5ckpt prune --keep-step refuses it',
    'LazyArray': 'shape dtype get_fn slice_fn name | hint | used when it is read',
    'LazyAwaitableArray': 'shape dtype get_fn slice_fn name | hint | used when it is read',
    'LazyThreadPoolArray': 'shape dtype get_fn slice_fn name | hint | used when it is read',
    'LazyArray.astype': 'dtype | hint | the dtype that it has',
    'LazyAwaitableArray.from_array': 'array get_fn dtype | hint | used when it is read',
    'LazyAwaitableArray.from_tensor_store_spec': 'ts_spec get_fn dtype | hint | used when it is read',
    'LazyAwaitableArray.from_tensor_store_spec_or_array': 'maybe_ts_spec get_fn dtype | hint | used when it is read',
    'LocalTier': """
directory | error | the run's directory, in it, or around it
keep upload_gbps | error | out of range
persist | error | SaveOnPreemption without preempted
persist | warning | no save has a metric of the policy: MissingMetricWarning
""",
    'PendingSave.add_done_callback': 'callback | hint | called at once when the save has ended',
    'PendingSave.result': 'timeout | hint | the save has ended',
    'PendingSave.wait': 'timeout | hint | the save has ended',
    'PreemptionNotice': 'signals | error | none\nsignals | warning | a notice that is asked and was never entered',
    'ProgressReporter': 'label stream every clock | hint | how the line looks; at least the last one is written',
    'Run.best_step': 'metric mode | error | no policy says which, or no step has it and some have others',
    'Run.report': """
output | error | it exists
steps | error | more than two, or there is no such step
sample_bytes | error | below 1; a larger one than the checkpoint reads all
""",
    'Run.series': """
name fn | error | no step has the leaf
since | hint | before the first step; after the last, the series is empty, since a step may still come
""",
    'SaveAt': 'steps | hint | steps that may still come; none, where a program computes them',
    'SaveBestCheckpointer': """
partitioner dataset_iterator others | hint | as Checkpointer, see there
keep | hint | None keeps all
metric_name_to_monitor | warning | a step comes without it: MissingMetricWarning; best_step takes it with keep=None
metric_mode | hint | best_step takes it with keep=None
metric_mode | warning | the default, with a metric such as a loss: MetricModeWarning
keep_checkpoints_without_metrics force_keep_period | warning | keep is None
""",
    'SaveEvery': 'steps min_step | error | out of range',
    'SaveEverySeconds': 'seconds min_step | error | out of range',
    'SaveLast': 'step | error | below 0; a step that never comes is the end that never comes',
    'SaveOnImprovement': """
metric | warning | it does not come: MissingMetricWarning
mode | warning | the default, with a metric such as a loss: MetricModeWarning
mode least min_step | error | out of range
""",
    'SaveWhenIdle': 'min_step | error | out of range',
    'CheckpointDiff.only': 'what | error | unknown word',
    'CheckpointDiff.top': 'count | hint | a limit',
    'TensorBoardMetrics': 'directory | warning | no event file has the metric: MissingMetricWarning',
    'TensorBoardMetrics.by_step': 'metric steps | hint | steps without the metric are absent from what is returned',
    'WarmStart': """
take leave rename resize | error | a pattern matches nothing
missing strict | error | unknown word
restore_iterator | report | where the data starts: logged
restore_iterator | error | True without dataset_iterator
""",
    'WarmStart.takes': 'name | hint | asks',
    'WarmStart.taken': 'names | hint | asks',
    'ConvertOptions.takes': 'name | hint | asks',
    'ConvertOptions.taken': 'names | hint | asks',
    'WarmStart.sources': 'held template repeats | hint | for a restore',
    'apply_assignment_map': """
ckpt_optimizer_state optimizer_state | error | they do not fit
assignment_map require_all_rules_match | error | a rule matches nothing
is_resuming | hint | True returns the state as it is, as in T5X
""",
    'checkpoints_iterator': """
directory | hint | a run that begins there: it waits
after | hint | larger than all steps: it waits
timeout poll_seconds | error | below 0
every | hint | one step at a time comes anyway
hold_seconds | error | not above 0, or no right to write
""",
    'convert_checkpoint': """
target | error | it has the step already, or exists
kind | error | unknown
""",
    'copy_checkpoint': 'target | error | it has the step already',
    'get_checkpoint_dir': 'step | hint | any step has a name\nstep_format_fixed_length | hint | a step that is as long already',
    'diff': """
values | hint | there are no values to compare
sample_bytes | error | below 1; a larger one than the checkpoint compares all
""",
    'intersect_state': 'intersect_state_dict | report | what a restore leaves out is logged',
    'load_t5x_checkpoint': """
state_transformation_fns remap | warning | remap=False leaves the transforms out, as in T5X
restore_dtype | error | meant for no floating leaf
lazy_parameters | hint | numbers and texts are in the manifest
""",
    'is_pinned_checkpoint': 'ckpt_dir | hint | False, as in T5X',
    'pin_checkpoint': 'txt | hint | the default keeps the reason that is there',
    'unpin_checkpoint': 'ckpt_dir | report | it is not pinned: logged',
    'restore_or_init': """
checkpointer init_fn | hint | called where something is new
fallback | error | unknown word
initial_checkpoint | error | it gives no leaf
initial_checkpoint | hint | the run has a step of its own (documented)
rename missing strict resize | hint | the run has no step of its own, or one that fits the template
donate | warning | the template holds no jax.Array
""",
    'verify': """
full | report | no checksums: VerifyReport.has_checksums and its text say so
follow_links | warning | not on a local file system
""",
    'convert.seqax.write_seqax': 'directory | error | it has the step already\nstep | hint | the step to write',
    'convert.seqax.seqax_steps': 'directory | hint | a run that begins there: it has no steps yet',
    'datasets.as_dataset_iterator': 'iterator | error | it cannot return its position',
    'storage.options.FileOptions': """
direct_bytes | error | below 1
""",
    'storage.options.AzureOptions': """
account endpoint anonymous retry_seconds | error | of another type; what they are for may not come
""",
    'storage.options.BucketOptions': """
retry_seconds | error | of another type; what they are for may not come
""",
    'storage.options.S3Options': """
endpoint anonymous region retry_seconds | error | of another type; what they are for may not come
profile | error | with anonymous=True
""",
    'training.MetricWriter': 'directory | error | not a local file system\nresume_at | hint | nothing was written beyond it',
    'training.MetricWriter.write': 'metrics | error | a value that is not a number',
    'training.ProfilerWindow': """
directory | hint | it is made
start count | report | none of the steps came
count | error | below 1
""",
    'training.ProfilerWindow.before': 'step wait_for | hint | outside the window',
    'training.Watchdog': 'seconds first_seconds | error | not above 0\nfile kill | hint | no step is late',
    'training.peak_flops': 'device | hint | None where it is not known',
    'training.write_state_summary': 'directory | hint | it is made',
    'training.write_hlo': """
directory | hint | it is made
name compiled | error | no such thing
seconds | report | no picture: a warning of the log says why
""",
}

COMMON_OPTIONS = """
path paths out source directory target a b | error | nothing is there, or something is
--step --as-step | error | no such step; a verb where it means nothing names the other
--json | error | with an option of another form
--storage-option | error | no path is on a storage that has it
--dry-run --yes --force | hint | where there is nothing to write, to ask or to replace
--save-dtype --cast-leaves | error | meant for no floating leaf; without a dtype
--compression --concurrent-gb | error | to Orbax
--take --leave | error | it matches nothing
"""

VERBS = {
    'best': 'metric | error | no step has it\n--mode | error | the policy says neither',
    'cat': """
leaf | error | no such leaf
--npy | error | with --json, or no array
--follow-links | warning | not on a local file system
""",
    'convert': """
kind | error | unknown
--rules | error | not for tf
--config | error | it does not fit; not for Hugging Face
--max-shard-size --scanned --split-heads | error | not for Hugging Face
""",
    'cp': """
--follow-links | warning | not on a local file system
--rename | error | matches nothing
--trust-files | warning | no list of checksums is lost
""",
    'diff': """
pattern | error | neither has such a leaf
--top --by-layer | error | with --no-values
--no-values | hint | no values to compare
--follow-links | warning | not on a local file system
""",
    'ls': '--all | hint | there is nothing else',
    'pin': '--why | hint | without it, the reason that is there stays',
    'prune': """
--keep --every --every-hours | report | all stay: the table says why
--best | error | no step has the metric
--keep-best --mode | error | without --best
--keep-step | error | there is no such step: exit 2, and nothing is deleted
""",
    'report': """
--output | error | it exists
--sample | error | no size; a larger one than the checkpoint reads all
""",
    'rm': """
others | error | no such step
--pinned | hint | none is pinned
--force | hint | none waits for its upload
""",
    'show': """
--depth | error | with --sort or --json
--grep | error | matches no name: exit 1, and unmatched in --json
--sort | hint | how it looks
--follow-links | warning | not on a local file system
""",
    'stats': """
leaves | error | matches nothing
--fail-on-nan | hint | there is none: exit 0
--follow-links | warning | not on a local file system
""",
    'verify': """
--full | report | no checksums: the report says so
--follow-links | warning | not on a local file system
""",
}

# What the library makes and returns, or passes to a policy or a callback; users do not call these.
RETURNED = """
CheckpointDiff CheckpointView CommittedCheckpoint ConvertReport
ParameterInfo PendingSave RestoreStateTransformationFn
Run SaveStateTransformationFn VerifyReport
"""

PUBLIC = ('', 'convert.seqax', 'datasets', 'training')
ANSWERS = {'error', 'warning', 'report', 'hint'}
# Public names of these modules that no user calls.
INTERNAL = {
    'datasets': {
        'DatasetState',
        'StateIterator',
        'TfDataIterator',
        'by_shard',
        'decode_state',
        'encode_state',
        'positions_in',
        'warn_of_unused',
    },
}


def rows(text: str) -> dict[str, set[str]]:
    """The answers of each name in a table, checked; a name has a row for each answer."""
    found: dict[str, set[str]] = {}
    for line in text.strip().splitlines():
        names, answer, reason = map(str.strip, line.split(' | '))
        assert answer in ANSWERS, line
        assert reason, line
        for name in names.split():
            assert answer not in found.setdefault(name, set()), line
            found[name].add(answer)
    return found


def public_callables() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Each public function, constructor and method by its name."""
    yield from ((f'storage.options.{options.__name__}', options) for options in BY_SCHEME.values())
    returned = RETURNED.split()
    for module in PUBLIC:
        place = importlib.import_module(f't5ckpt.{module}'.rstrip('.'))
        for name in set(place.__all__) - INTERNAL.get(module, set()):
            value = getattr(place, name)
            if not callable(value) or getattr(value, '__module__', '').split('.')[0] != 't5ckpt':
                continue
            if not inspect.isclass(value):
                yield f'{module}.{name}'.lstrip('.'), value
            elif not issubclass(value, BaseException):
                if name not in returned:
                    yield f'{module}.{name}'.lstrip('.'), value
                for method in dir(value):
                    held = inspect.getattr_static(value, method)
                    is_ours = method in vars(value) or not any(
                        hasattr(base, method) for base in value.__mro__[1:] if base.__name__ in t5ckpt.__all__
                    )
                    is_asked = not method.startswith('_') and method not in vars(collections.abc.Mapping)
                    if is_ours and is_asked and isinstance(held, (FunctionType, classmethod, staticmethod)):
                        yield f'{module}.{name}.{method}'.lstrip('.'), getattr(value, method)


def commands() -> Iterator[tuple[str, click.Command]]:
    """Every command by its words."""
    for name in VERB_MODULES:
        yield name, app.get_command(click.Context(app), name)
