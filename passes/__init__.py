"""The compiler's stages, one per file: a captured graph becomes facts, facts a plan, and the plan nodes in the graph.

This folder is the package `tencache_fx.passes`; it has no other name, because a module imported under two names exists
twice, and its classes then differ from themselves.
"""

if __name__ != "tencache_fx.passes":
    raise ImportError(f"Import tencache_fx.passes, not {__name__}.", name=__name__)
