"""Connects ckptkit to other frameworks. A framework is needed only when its module is imported."""
