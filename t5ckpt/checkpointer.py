"""The checkpointer of a training loop, which composes the stages of saves and restores.

    save      state -> table -> [save transforms] -> plan -> stage -> write -> commit -> retention
    restore   path or step -> contents -> [restore transforms] -> plan -> read -> state

A blocking save starts an asynchronous one and waits for it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from t5ckpt.catalog.locate import log_other_contents, open_run_storage
from t5ckpt.commit.deletion import delete_step
from t5ckpt.commit.retention import Retention, RunFacts, dataset_count
from t5ckpt.commit.transaction import CommittedCheckpoint
from t5ckpt.core.arguments import check_callables, check_flags, check_kind, given_step, integer
from t5ckpt.core.byte_budget import bytes_of_gb
from t5ckpt.core.call_site import CallSite, Notices
from t5ckpt.core.leaf_patterns import Pattern, Patterns
from t5ckpt.core.protocols import (
    MetricSource,
    Partitioner,
    Progress,
    RestoreStateTransformationFn,
    SaveStateTransformationFn,
)
from t5ckpt.core.thread_pool import finished_before_exit
from t5ckpt.datasets import DatasetState
from t5ckpt.distributed.coordinator import Coordinator
from t5ckpt.distributed.rounds import Phase
from t5ckpt.errors import (
    ClosedError,
    DisagreementError,
    ReadOnlyError,
    SaveFailedError,
    StepKeptError,
    StorageError,
    T5CkptError,
)
from t5ckpt.format.facts import Facts
from t5ckpt.format.keep_policy import fields_of
from t5ckpt.options import CheckpointerOptions
from t5ckpt.planning.casts import Cast, casts_of
from t5ckpt.planning.leaf_choice import LeafChoice
from t5ckpt.planning.restore_plan import RestoreOptions, strictness
from t5ckpt.planning.save_plan import SaveOptions
from t5ckpt.policies import KeepAll, KeepLatest, KeepPolicy, StepInfo
from t5ckpt.restore.request import check_source
from t5ckpt.restorer import Restorer
from t5ckpt.save.arguments import (
    check_no_directory,
    check_policies,
    check_preemption,
    in_order,
    metric_numbers,
    ordered,
    plain_json,
    warn_of_idle,
)
from t5ckpt.save.best_step import best_step_of, monitored_metrics, warn_of_missing_metrics
from t5ckpt.save.encoding import compression_for
from t5ckpt.save.execute import PreparedSave
from t5ckpt.save.pending import PendingSave
from t5ckpt.save.prepare import prepare_save
from t5ckpt.save.request import SaveContext, SaveRequest
from t5ckpt.save.schedule import SaveSchedule
from t5ckpt.save.template_check import TemplateCheck
from t5ckpt.save.transforms import LeafAxes, transformed
from t5ckpt.save_policies import SavePolicy
from t5ckpt.storage import PathOrStorage, require_directory
from t5ckpt.translate import CheckpointTranslator
from t5ckpt.tree.leaf_table import LeafTable
from t5ckpt.tree.train_state import flatten_state, step_to_save

if TYPE_CHECKING:
    from t5ckpt.tiers.local_tier import LocalTier
    from t5ckpt.tiers.tier import Tier


class Checkpointer:
    """Saves and restores a train state, in T5X's format. The signatures are T5X's, plus keywords.

    Args:
      train_state: the template: the structure, shapes, dtypes and shardings to restore to. An object with T5X's protocol, a
        Flax TrainState or any pytree; leaves may be jax.ShapeDtypeStruct.
      partitioner: that of T5X, which gives the mesh and the axes to restore to. Without one, the leaves' shardings are used.
      checkpoints_dir: the run's directory: a path, the URL of a supported storage, or a Storage. With the empty path, which
        T5X's restorers pass, ``restore(path=...)`` works, and methods that need the directory raise ValueError.
      dataset_iterator: its position is saved with the state: tf.data, Grain or torch; see docs/data-iterators.md.
      keep: the number of latest checkpoints to keep, at least 1; None keeps all.
      save_dtype: floating leaves of ``target`` and ``params`` are cast to it on save; None casts nothing.
      restore_dtype: the same on restore; 'template' casts every floating leaf to its dtype in ``train_state``.
      keep_dataset_checkpoints: the number of latest checkpoints that keep their iterator state; None keeps all.
      keep_policy: decides instead of ``keep``, see ``policies.py``.
      metric_source: provides metrics that were not passed to ``save`` to keep policies, such as TensorBoardMetrics.
      save_policy: decides when ``maybe_save`` saves, see ``save_policies.py``.
      preempted: returns whether this process is preempted, such as a PreemptionNotice; called by ``maybe_save``.
      progress: called with (bytes done, bytes in total) during saves and restores, from their threads. An
        exception that it raises fails the save or the restore.
      storage_options: of the run's storage: endpoint, credentials, retries, ...; see docs/storage.md.
      read_only: saving and deleting raise ReadOnlyError.
      local: a LocalTier: saves are written to its directory of this machine, and uploads to ``checkpoints_dir`` follow in the
        background. See docs/tiers.md.
      options: how it saves and restores, see :class:`CheckpointerOptions`.
      use_gda: an argument of older versions of T5X; ignored with a warning.

    Notes:
      One save runs at a time; a second one waits for the first. Call the methods from one thread, that of the training
      loop. Nothing is created on storage before the first save. Use it as a context manager, or call ``close``.
    """

    def __init__(
        self,
        train_state: Any,
        partitioner: Partitioner | None = None,
        checkpoints_dir: PathOrStorage = '',
        dataset_iterator: Any = None,
        *,
        keep: int | None = None,
        save_dtype: Any = None,
        restore_dtype: Any = None,
        use_gda: bool | None = None,
        keep_dataset_checkpoints: int | None = None,
        keep_policy: KeepPolicy | None = None,
        save_policy: SavePolicy | None = None,
        preempted: Callable[[], bool] | None = None,
        metric_source: MetricSource | None = None,
        local: LocalTier | None = None,
        storage_options: Mapping[str, Any] | None = None,
        read_only: bool = False,
        progress: Progress | None = None,
        options: CheckpointerOptions = CheckpointerOptions(),
    ):
        importlib.import_module('jax')  # A save at the end of the interpreter can no longer import it.
        check_no_directory(train_state=train_state, partitioner=partitioner)
        check_policies(keep, keep_policy, save_policy, metric_source)
        check_callables(preempted=preempted, progress=progress)
        check_flags(read_only=read_only)
        self._storage = open_run_storage(checkpoints_dir, storage_options)
        # Absolute, so that a later chdir does not change it.
        self.checkpoints_dir = self._storage.url()
        cast, restore_cast = casts_of(save_dtype, restore_dtype, options.cast_leaves)
        self._options, self._axes = options, LeafAxes(partitioner, train_state)
        dataset = DatasetState.of(dataset_iterator, partitioner, options.map_positions)
        policy = _latest(keep) if keep_policy is None else keep_policy
        datasets = dataset_count(keep_dataset_checkpoints)
        self._retention = Retention(self._storage, policy, options.clock, datasets, metric_source)
        alike = {name: bool(getattr(options, name)) for name in ('follow_links', 'share_replicated', 'strict_save')}
        alike |= {'local': local and 'a LocalTier', 'read_only': bool(read_only), 'verify': options.verify}
        coordinator, notices = Coordinator(self._storage, options.processes, options.process_timeout, alike), Notices()
        self._is_read_only, self._has_source = read_only, metric_source is not None
        # The local directory, and what it adds; saves go to it.
        self._tier = tier = None if local is None else self._tier_of(local, preempted, coordinator)
        self._restorer = Restorer(
            self._storage, storage_options, train_state, partitioner, dataset, coordinator, tier, options, progress,
            notices, read_only, restore_cast,
        )  # fmt: skip
        self._steps: RunFacts = self._retention if tier is None else tier
        saves_to, retention = (self._storage, self._retention) if tier is None else (tier.storage, tier.retention)
        codec = compression_for(options.compression, saves_to)
        # SaveBestCheckpointer without keep: an explicit KeepAll whose ``keep`` may be set later. A reader asks for ``metrics``.
        asked = None if read_only or isinstance(keep_policy, KeepAll) else metric_source
        warn_of_idle(policy, asked, dataset, keep_dataset_checkpoints, use_gda)
        # The last makes a policy of ``keep``; None if the caller passed a policy.
        self._keep, self._is_closed, self._policy_of_keep = keep, False, _latest if keep_policy is None else None
        self._save_context = SaveContext(
            saves_to, SaveOptions(cast, codec, options.chunk_bytes, options.inline_bytes), retention, progress,
            options.clock, notices, reuses=options.reuse_unchanged,
        )  # fmt: skip
        self._monitored = monitored_metrics(policy, save_policy)
        # Nothing here may refer to this object: its template and data iterator are freed with it, not by a later collection.
        self._template_check = TemplateCheck(self._axes, notices, is_strict=options.strict_save)
        self._schedule = SaveSchedule(save_policy, coordinator, self._steps, options.clock, preempted, notices)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        error = raised[1]
        # An error may have ended the loop before its first maybe_save.
        self._schedule.is_used |= error is not None
        try:
            self.close()
        except SaveFailedError as failed:
            # The error of the loop is the one to read; sys.exit(0) would hide the failure.
            if not isinstance(error, Exception):
                raise
            error.add_note(f'{failed}')

    def __reduce__(self) -> Any:
        raise TypeError(
            f'the checkpointer of {self.checkpoints_dir} cannot be pickled or copied. Make one in the other process.'
        )

    def _tier_of(self, local: LocalTier, preempted: Any, coordinator: Coordinator) -> Tier:
        # Imported here, because only a checkpointer with a local directory needs it.
        from t5ckpt.tiers.local_tier import LocalTier
        from t5ckpt.tiers.tier import Tier

        check_kind('local', local, LocalTier, "local=LocalTier('/ssd/run')")
        check_preemption(local.persist, preempted, 'uploads')
        require_directory(self._storage)
        read_only = self._is_read_only
        return Tier(local, self._storage, self._retention, self._options.clock, coordinator, read_only=read_only)

    @property
    def restored_step(self) -> int | None:
        """The step of this run that the last restore restored; None after a restore from a ``path``."""
        return self._restorer.restored_step

    @property
    def restore_dtype(self) -> Any:
        """The dtype of the restores that follow; may be set, as in T5X."""
        cast = self._restorer.cast
        return None if cast is None else 'template' if cast.dtype is None else cast.dtype

    @restore_dtype.setter
    def restore_dtype(self, dtype: Any) -> None:
        self._restorer.cast = Cast.of_restore(dtype, self._options.cast_leaves)

    def __repr__(self) -> str:
        latest: Any = None
        try:
            latest = None if self._storage.is_absent else self._steps.latest()
        except T5CkptError as error:
            latest = f'<{type(error).__name__}>'
        return f'{type(self).__name__}({self.checkpoints_dir!r}, latest_step={latest})'

    @property
    def keep(self) -> int | None:
        """The number of checkpoints to keep; may be set, with effect from the next save."""
        return self._keep

    @keep.setter
    def keep(self, keep: int | None) -> None:
        if self._policy_of_keep is None:
            raise ValueError(
                f'keep cannot be set to {keep!r}: the checkpointer was made with keep_policy={self._retention.policy}, which '
                'selects the steps to keep. Make a checkpointer with keep= instead.'
            )
        self._retention.policy = self._policy_of_keep(keep)
        self._keep = keep

    @property
    def keep_dataset_checkpoints(self) -> int | None:
        """The number of checkpoints that keep their iterator state; may be set, with effect from the next save."""
        return self._retention.keep_datasets

    @keep_dataset_checkpoints.setter
    def keep_dataset_checkpoints(self, keep: int | None) -> None:
        self._retention.keep_datasets = dataset_count(keep)

    # --- saving ------------------------------------------------------------------------------------------------------

    def save(
        self,
        train_state: Any,
        state_transformation_fns: Sequence[SaveStateTransformationFn] | Any = (),
        *,
        concurrent_gb: float = 128,
        step: int | None = None,
        metrics: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        custom_metadata: Mapping[str, Any] | None = None,
    ) -> CommittedCheckpoint | None:
        """Saves, and returns when the checkpoint is durable and visible.

        ``save(state)`` saves as the state's own step, ``save(state, step=40)`` as step 40; ``save(40, state)``, Orbax's
        order, does the same.

        Args:
          train_state: of the constructor's structure; leaves are arrays, numpy arrays, Python numbers and LazyArrays.
          state_transformation_fns: called in order with (state dict, parameter infos); each returns both.
          concurrent_gb: gigabytes (10^9 bytes) of host memory in flight; a larger array is written alone.
          step: the step to save as; None takes the state's step. If the two differ, a StepMismatchWarning is issued once.
          metrics: numbers by name, stored in its facts and read by keep policies; those of process 0 are used.
          overwrite: replaces a complete checkpoint of the step, after the new one is complete. Not on an object store if T5X
            wrote the old one: call ``delete(step)`` first.
          custom_metadata: a mapping of JSON's types, stored in its facts; ``open_checkpoint(...).custom_metadata`` returns it.
            That of process 0 is used.

        Returns:
          The checkpoint; None if the save was dropped, because the step has a complete one or another process writes or deletes
          it. The log has the reason.

        Raises:
          UnsupportedLeafError: a leaf cannot be written; nothing was written.
          StepKeptError: the step to overwrite is pinned or held by a reader.
          CheckpointExistsError: the step to overwrite is on an object store and cannot be replaced by one write.
          UnsupportedFormatError: the step to overwrite is in the layout of Orbax or Flax.
          TreeMismatchError: with ``strict_save``, the state does not match the template; nothing was written.
          StorageError: the checkpoint did not become visible, and its files were removed.

        Notes:
          A state that does not match the template is saved with a TemplateMismatchWarning. With transforms there is no
          such check, because a restore applies other transforms to their result.
        """
        pending = self._started(
            False, train_state, state_transformation_fns, step, concurrent_gb, metrics, overwrite, custom_metadata
        )
        return pending.result()

    def save_async(
        self,
        train_state: Any,
        state_transformation_fns: Sequence[SaveStateTransformationFn] | Any = (),
        *,
        concurrent_gb: float = 128,
        step: int | None = None,
        metrics: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        custom_metadata: Mapping[str, Any] | None = None,
    ) -> PendingSave:
        """Returns as soon as the state may be donated or overwritten, and saves in the background.

        Waits for a running save first. The arguments are those of :meth:`save`. An error in the background is raised by
        ``result()`` of the returned object, or by the next save, ``wait_until_finished``,
        ``check_for_errors`` or ``close``.
        """
        return self._started(
            True, train_state, state_transformation_fns, step, concurrent_gb, metrics, overwrite, custom_metadata
        )

    def maybe_save(
        self,
        step: int,
        train_state: Any,
        state_transformation_fns: Sequence[SaveStateTransformationFn] = (),
        *,
        metrics: Mapping[str, Any] | None = None,
        custom_metadata: Mapping[str, Any] | None = None,
    ) -> PendingSave | None:
        """Saves in the background if the save policy returns a reason. Call it at every step; a call takes microseconds.

        ``maybe_save(step, state)`` and ``maybe_save(state, step)`` do the same. In a job of several processes, all of them
        call it for the same steps, and pass metrics in the same calls. Check ``should_stop`` afterwards.

        Args:
          step: of the state.
          train_state: as for :meth:`save`; ignored if no save is due.
          state_transformation_fns: as for :meth:`save`.
          metrics: for the save policy, and as for :meth:`save`.
          custom_metadata: as for :meth:`save`.

        Returns:
          The started save, or None if no save is due.

        Raises:
          SaveFailedError: an earlier save failed; raised when the next one is due.
        """
        saved_step, state = in_order(step, train_state, 'maybe_save')
        save = functools.partial(
            self.save_async, state, state_transformation_fns, step=saved_step, custom_metadata=custom_metadata
        )
        return self._schedule.save_if_due(integer('step', saved_step), metrics, lambda numbers: save(metrics=numbers))

    @property
    def should_stop(self) -> bool:
        """Whether a process of the job is preempted; set in all processes at the same call of ``maybe_save``."""
        return self._schedule.should_stop

    def _started(
        self,
        in_background: bool,
        train_state: Any,
        state_transformation_fns: Any,
        step: Any,
        concurrent_gb: float,
        metrics: Mapping[str, Any] | None,
        overwrite: bool,
        custom_metadata: Mapping[str, Any] | None,
    ) -> PendingSave:
        state, transforms, named = ordered(train_state, state_transformation_fns, step)
        check_flags(overwrite=overwrite)
        facts = Facts(
            custom_metadata=plain_json('custom_metadata', custom_metadata),
            metrics=metric_numbers(metrics),
            keep=fields_of(self._retention.policy) or {},
        )
        budget, began = bytes_of_gb(concurrent_gb), self._options.clock()
        self._refuse_if_read_only('save')
        if self._is_closed:
            raise ClosedError(
                f'the checkpointer of {self.checkpoints_dir} is closed: it does not wait for saves or report their errors. '
                'Save inside the with block, or before close().'
            )
        with finished_before_exit():
            # No frame refers to the prepared save, which has the staged arrays.
            pending = PendingSave(self._prepared(state, transforms, named, budget, overwrite, facts, in_background))
            self._restorer.saving = pending  # known before it is started
            pending.start()
            if not in_background:
                pending.result()
        self._schedule.record(pending, began, facts.metrics)
        return pending

    def _prepared(
        self, state: Any, transforms: Any, named: Any, budget: int, overwrite: bool, facts: Facts, in_background: bool
    ) -> PreparedSave:
        """Plans a save, and stages its first arrays; ``named`` is the step that the caller has named, or None."""
        save_round = self._restorer.round('a save' if named is None else f'the save of step {named}')
        with save_round.failing_together(Phase.PLAN):
            if self._tier is not None:
                # All processes take part in it.
                self._tier.begin_save()
            self.check_for_errors()
            table = flatten_state(state).table
            step = step_to_save(state, table, named)
            request = SaveRequest(
                self._save_context, step, budget, overwrite, facts, round=save_round, in_background=in_background,
                names_step=named is not None, site=CallSite.here(),
                # The iterator advances as soon as the caller continues.
                files={} if self._restorer.dataset is None else self._restorer.dataset.snapshot(save_round.processes),
            )  # fmt: skip
            if self._tier is not None:
                request = self._tier.with_upload(request, preempted=self.should_stop)
            if save_round.is_leader:
                self._save_context.later_steps.note_save(step)
            self._check_before_save(state, table, request, has_transforms=bool(transforms))
            return prepare_save(request, *transformed(table, self._axes, transforms))

    def _check_before_save(self, state: Any, table: LeafTable, request: SaveRequest, *, has_transforms: bool) -> None:
        """Warns of metrics that do not come, and of what a restore could not restore."""
        step, is_leader = request.step, request.round.is_leader
        if is_leader:
            given = [StepInfo(step, metrics=request.facts.metrics)]
            infos = self._retention.decided if self._has_source else given
            warn_of_missing_metrics(self._restorer.notices, self._retention.policy, infos, has_source=self._has_source)
        if not has_transforms:
            options = RestoreOptions(self._restorer.cast, strict=strictness(None, is_t5x=self._restorer.is_t5x))
            self._template_check.check(state, table, step, options, warns=is_leader)

    def wait_until_finished(self) -> None:
        """Waits for the save in the background, if there is one, and raises its error as :meth:`check_for_errors`."""
        self._restorer.wait()
        self.check_for_errors()

    def check_for_errors(self) -> None:
        """Raises SaveFailedError if a save in the background failed and no call has raised its error yet."""
        if self._restorer.saving is not None:
            self._restorer.saving.raise_unreported()

    def wait_until_persisted(self, step: int | None = None) -> None:
        """Waits until a step is in ``checkpoints_dir``; None waits for all steps that are to be uploaded.

        Without ``local``, a step is there when its save has ended.

        Raises:
          NotPersistedError: an attempt to upload it failed during the wait, or the step is not uploaded: the persist policy did
            not take it, a newer step was uploaded instead, or it is damaged. Without a step, if a step could not be uploaded.
          ClosedError: the checkpointer, with ``local``, is closed.
          SaveFailedError: as for :meth:`check_for_errors`.
        """
        self.wait_until_finished()
        wanted = given_step(step)
        if self._tier is not None:
            self._tier.wait_until_persisted(wanted)

    def close(self) -> None:
        """Waits for saves and uploads in the background, and raises the error of a save that no call has raised yet.

        Afterwards ``save`` and ``save_async`` raise ClosedError, and with ``local`` also ``delete`` and
        ``wait_until_persisted``. ``restore`` still works, except with ``local`` in a job of several processes.
        """
        self._is_closed = True
        self._restorer.wait()
        if self._tier is not None:
            self._tier.close()
        self.check_for_errors()
        self._schedule.warn_at_end(has_saved=self._restorer.saving is not None)

    # --- restoring ---------------------------------------------------------------------------------------------------

    def restore(
        self,
        step: int | None = None,
        path: str | os.PathLike[str] | None = None,
        state_transformation_fns: Sequence[RestoreStateTransformationFn] = (),
        fallback_state: Mapping[str, Any] | None = None,
        lazy_parameters: bool = False,
        *,
        take: Patterns = '.*',
        leave: Patterns | None = None,
        rename: Sequence[tuple[Pattern, str | None]] = (),
        missing: str = 'error',
        strict: str | None = None,
        resize: Patterns | None = None,
        donate: bool = False,
        restore_iterator: bool = True,
    ) -> Any:
        """Waits for a save in the background, then restores a train state of the constructor's structure.

        Args:
          step: which step of ``checkpoints_dir``; None takes the latest. Step 0 is a step.
          path: a checkpoint elsewhere: a run's directory, a step's directory or a manifest file, on any storage.
          state_transformation_fns: called in order with (checkpoint's state dict, template's state dict).
          fallback_state: values for leaves that the checkpoint lacks, nested like the template's state dict.
          lazy_parameters: returns arrays as LazyArray. Not with a partitioner that puts parameters on devices.
          take: patterns for whole names of leaves that come from the checkpoint; the others keep the template's values.
          leave: leaves that do not come from it, although ``take`` matches them.
          rename: (name in the template, name in the checkpoint), as in :class:`WarmStart`.
          missing: 'init' takes leaves that the checkpoint lacks from the template; 'error' lists them.
          strict: the required match of checkpoint and template, as in :class:`WarmStart`.
          resize: leaves that are padded with zeros or truncated to the template's shape, as in :class:`WarmStart`.
          donate: frees the arrays of the template before reading, so memory does not have to hold two states. They are freed
            only if the checkpoint matches, but stay freed if a read fails. On the CPU backend, the first step that donates the
            restored state takes new memory for its result.
          restore_iterator: whether the position of the data iterator, if there is one, is restored, too.

        Returns:
          A new state; the template is unchanged, except with ``donate``.

        Raises:
          CheckpointNotFoundError: the checkpoint does not exist.
          TreeMismatchError: checkpoint and template differ; the error lists every difference.
          FormatError, StorageError: the checkpoint cannot be read.
        """
        check_source(step, path)
        check_flags(lazy_parameters=lazy_parameters, donate=donate, restore_iterator=restore_iterator)
        check_kind('fallback_state', fallback_state, Mapping, "{'params': {...}}")
        return self._restorer.restore(
            LeafChoice(take=take, leave=leave, rename=rename, missing=missing, strict=strict, resize=resize),
            step=step,
            path=path,
            transforms=state_transformation_fns,
            fallback=fallback_state,
            lazy=lazy_parameters,
            donate=donate,
            leaves_iterator=not restore_iterator,
        )

    def restore_from_tf_checkpoint(
        self, path_or_dir: str | os.PathLike[str], strict: bool = True, translator: CheckpointTranslator | None = None
    ) -> Any:
        """Restores a train state of the constructor's structure from a TensorFlow checkpoint of Mesh-TensorFlow's T5.

        Args:
          path_or_dir: a directory, or the prefix of a checkpoint's files.
          strict: False ignores leaves that the template lacks. The checkpoint must have every leaf of the template either way.
          translator: rules for TensorFlow's names; None takes those of T5 (``convert/tf/rules.py``).

        Raises:
          TreeMismatchError: checkpoint and template differ, or a name has no rule; the error lists every difference.
        """
        from t5ckpt.convert.options import ConvertOptions
        from t5ckpt.convert.tf import open_tf, tf_leaves
        from t5ckpt.convert.tf.model import restore_tf

        restore_round = self._restorer.round('a restore')
        with restore_round.together(Phase.RESTORE):
            source = tf_leaves(open_tf(path_or_dir), ConvertOptions(translator=translator))
            return restore_tf(
                source, self._restorer.cast, self._restorer.template, self._restorer.partitioner, strict=strict
            )

    def convert_from_tf_checkpoint(
        self,
        path_or_dir: str | os.PathLike[str],
        *,
        state_transformation_fns: Sequence[SaveStateTransformationFn] = (),
        concurrent_gb: float = 16,
        translator: CheckpointTranslator | None = None,
    ) -> CommittedCheckpoint | None:
        """Writes a TensorFlow checkpoint as a step of ``checkpoints_dir``, tensor by tensor, in process 0.

        Leaves that the template lacks are left out. A conversion resumes one that was killed.

        Args:
          path_or_dir: see :meth:`restore_from_tf_checkpoint`.
          state_transformation_fns: as in ``save``.
          concurrent_gb: gigabytes (10^9 bytes) of values in flight.
          translator: see :meth:`restore_from_tf_checkpoint`.

        Returns:
          The checkpoint, in process 0; None in other processes, and if a complete one of this step exists.
        """
        from t5ckpt.convert.options import ConvertOptions
        from t5ckpt.convert.tf import open_tf, tf_leaves
        from t5ckpt.convert.tf.model import convert_tf_to_model

        require_directory(self._storage)
        saves, budget = self._save_context, bytes_of_gb(concurrent_gb)
        context = SaveContext(self._storage, saves.options, progress=saves.progress, clock=self._options.clock)
        request = SaveRequest(context, 0, budget)
        committed: CommittedCheckpoint | None = None

        def convert(_: Sequence[Any]) -> None:
            nonlocal committed
            source = tf_leaves(open_tf(path_or_dir), ConvertOptions(translator=translator))
            committed = convert_tf_to_model(source, request, self._axes, state_transformation_fns)

        self._restorer.round('a conversion').reduce_on_leader(Phase.CONVERT, None, convert)
        return committed

    # --- asking and deleting -----------------------------------------------------------------------------------------

    def should_save(self, step: int, *, metrics: Mapping[str, Any] | None = None) -> bool:
        """Whether ``maybe_save`` would start a save at this step. Has no side effects and does not communicate.

        In a job of several processes, the answer is based on the latest coordination round of ``maybe_save``, so it is the
        same in all of them. Before the first one, each call lists the steps on storage, and no time has passed.

        Raises:
          ValueError: the checkpointer has no save policy.
        """
        return self._schedule.would_save(integer('step', step), metrics)

    def reached_preemption(self, step: int) -> bool:
        """Whether a process of the job is preempted; the same at the same step in all processes.

        For loops without ``maybe_save``; all processes call it for the same steps. Loops with ``maybe_save`` use
        ``SaveOnPreemption`` and ``should_stop`` instead.

        Raises:
          ValueError: the checkpointer was made without ``preempted=``.
        """
        return self._schedule.is_preempted(integer('step', step))

    def metrics(self, step: int | None = None) -> dict[str, float]:
        """The metrics of a step that were passed to ``save``, and those of the keep policy from the metric source.

        Args:
          step: None takes the latest.

        Raises:
          CheckpointNotFoundError: there is no such step.
        """
        self._restorer.wait()
        return dict(self._steps.metrics_at(given_step(step)))

    def best_step(self, metric: str | None = None, mode: str | None = None) -> int | None:
        """The step with the best value of a metric; the newest of equal ones. NaN is never the best.

        Args:
          metric: its name; None takes that of the keep policy, or else that of the save policy.
          mode: 'max' or 'min'; None takes the policy's.

        Returns:
          The step, or None if there is no step, no step has any metric, or all values are NaN. With ``read_only`` and a metric
          source, also if no step has this metric yet.

        Raises:
          ValueError: no policy, or more than one, determines the metric or the mode; or the steps have only other metrics.
        """
        self._restorer.wait()
        self._schedule.is_used = True
        # A reader, such as an evaluator, does not provide the metric; the source may return it later.
        awaited = [name for name, _ in self._monitored] if self._is_read_only and self._has_source else ()
        return best_step_of(self._steps, self._monitored, metric, mode, awaited).step

    def delete(self, step: int) -> None:
        """Deletes one step: hides it in one atomic operation, and then removes it. All processes of the job call it.

        Raises:
          CheckpointNotFoundError: the step does not exist.
          StepKeptError: it is pinned or held by a reader.
          StorageError: it could not be made invisible, and is unchanged.
        """
        step_to_delete = integer('step', step)
        self._refuse_if_read_only(f'delete step {step_to_delete}')

        tier = self._tier

        def decide(votes: Sequence[Any]) -> int | None:
            steps, refusals, parts = zip(*votes, strict=True)
            if any(step != step_to_delete for step in steps):
                raise DisagreementError(f'the processes were asked to delete different steps: {steps}.')
            if any(refusals):
                raise StepKeptError(next(filter(None, refusals)))
            if tier is None:
                delete_step(self._storage, step_to_delete, self._options.clock)
            else:
                tier.delete(step_to_delete, is_local=any(parts))
            with contextlib.suppress(StorageError):
                return self.latest_step()
            # The step is deleted.
            return None

        deletion = self._restorer.round(f'the deletion of step {step_to_delete}')
        with contextlib.ExitStack() as stack:
            with deletion.failing_together(Phase.DELETE):
                vote = (step_to_delete, *(('', False) if tier is None else tier.deletion_vote(step_to_delete)))
                if tier is not None:
                    stack.enter_context(tier.without_upload(step_to_delete))
            latest = deletion.reduce_on_leader(Phase.DELETE, vote, decide)
            if tier is not None and not deletion.is_single_process:
                with deletion.together(Phase.COMMIT):
                    if not deletion.is_leader:
                        tier.delete_local(step_to_delete)
        self._schedule.forget(step_to_delete, latest)

    def _refuse_if_read_only(self, action: str) -> None:
        require_directory(self._storage)
        if self._is_read_only:
            raise ReadOnlyError(
                f'cannot {action}: the checkpointer of {self.checkpoints_dir} was made with read_only=True. Make one without it.'
            )

    # --- steps -------------------------------------------------------------------------------------------------------

    def all_steps(self) -> list[int]:
        """The complete steps, ascending.

        With ``local``, each process of a job lists its own disk and ``checkpoints_dir``, so the lists may differ after a lost
        disk. ``restore_or_init`` chooses one step for all processes.
        """
        return self._steps.steps()

    def latest_step(self) -> int | None:
        """The largest complete step, or None, logged as by ``t5ckpt.latest_step``; see :meth:`all_steps` for ``local``."""
        step = self._steps.latest()
        if step is None:
            log_other_contents(self._storage)
        return step

    def all_dataset_checkpoint_steps(self) -> list[int]:
        """The steps with data-iterator state, ascending."""
        return self._steps.dataset_steps()


def _latest(keep: int | None) -> KeepPolicy:
    return KeepAll() if keep is None else KeepLatest(integer('keep', keep, 1, 'None keeps all.'))
