"""Gives the warnings of one checkpointer, each once per cause."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping

from t5ckpt.core.call_site import CallSite
from t5ckpt.errors import MissingMetricWarning, T5CkptWarning, UnshardedTemplateWarning

__all__ = ['Notices']


class Notices:
    """Remembers the causes of which the user has been warned.

    Notes: if a filter turns the warning into an error, it is raised every time. A warning may be given in the thread of a
      save, which then fails before its commit.
    """

    def __init__(self) -> None:
        self._given: set[Hashable] = set()

    def is_new(self, cause: Hashable) -> bool:
        """Whether no warning has been given for this cause."""
        return cause not in self._given

    def add(self, cause: Hashable) -> None:
        """Records a cause that another warning has covered."""
        self._given.add(cause)

    def warn(self, cause: Hashable, warning: T5CkptWarning, site: CallSite | None = None) -> None:
        """Warns once per cause. Outside the caller's thread, ``site`` is the line of the caller that is reported."""
        if cause in self._given:
            return
        (CallSite.here() if site is None else site).warn(warning)
        self._given.add(cause)

    def unsharded(self, text: str) -> None:
        """Warns once per checkpointer of a template without shardings, with the code that attaches them."""
        cure = (
            'Attach shardings to the template: jax.eval_shape(jax.jit(init, out_shardings=...)), or '
            'jax.ShapeDtypeStruct(shape, dtype, sharding=...). If one device is meant: '
            'sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]).'
        )
        self.warn('unsharded', UnshardedTemplateWarning(f'{text} {cure}'))

    def missing_metrics(self, missing: Mapping[str, tuple[int, Collection[str]]]) -> None:
        """Warns of metrics that a keep policy needs; by name, a step without the metric and the metrics of that step."""
        for name, (step, held) in missing.items():
            text = (
                f'step {step} has no metric {name!r}, which the keep policy looks at; it has: {", ".join(held) or "none"}. '
                f'Pass metrics={{{name!r}: ...}} to save, or name another metric in the policy.'
            )
            self.warn(('keep_policy', name), MissingMetricWarning(text))
