"""The built-in backends. Installed as ``syncprims.backends``, and reached by name only."""
