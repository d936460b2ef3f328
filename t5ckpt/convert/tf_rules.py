"""The public path of ``t5ckpt.convert.tf.rules``."""

from t5ckpt.convert.tf.rules import PARAM_STATES, STEP, T5_RULES, check_complete, with_all_slots, with_shared_relpos

__all__ = ['PARAM_STATES', 'STEP', 'T5_RULES', 'check_complete', 'with_all_slots', 'with_shared_relpos']
