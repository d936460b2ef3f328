"""What the tests share. Nothing here imports `t5ckpt`."""
