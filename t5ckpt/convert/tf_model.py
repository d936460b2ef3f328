"""The public path of ``t5ckpt.convert.tf.model``."""

from t5ckpt.convert.tf.model import convert_tf_to_model, restore_tf

__all__ = ['convert_tf_to_model', 'restore_tf']
