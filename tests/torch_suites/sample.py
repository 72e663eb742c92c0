"""Cases of torch's suites: a few for every run of our tests, and the others for the nightly."""

PARTS: tuple[tuple[str, ...], ...] = (
    (
        "op_db:transpose:plain",  # views
        "op_db:mul:inplace",
        "op_db:nn.functional.dropout:plain",  # random
        "hop_db:cond.simple:plain",
        "module_db:nn.BatchNorm1d:plain",  # buffers
    ),
    (
        "op_db:mul:complex",
        "op_db:sort:plain",  # several results
        "custom_op_db:NumpyCubeCustomOp:plain",
        "op_db:linalg.lu:dynamic",  # of the lesser of two sizes
        "op_db:sqrt:inductor",
        "op_db:unbind:plain",
        "op_db:index_add:mutated",
        "op_db:var_mean:plain",
        "hop_db:auto_functionalize.simple:plain",
        "op_db:softmax:bf16",
        "op_db:select:plain",
        "op_db:diagonal:plain",
        "op_db:sin:inplace",
        "op_db:clamp:mutated",
        "op_db:linalg.inv:complex",
        "op_db:cumsum:plain",
        "op_db:topk:plain",
        "op_db:exponential:mutated",  # random, and compiled
        "hop_db:scan.simple:plain",
        "hop_db:invoke_subgraph.simple:plain",
        "custom_op_db:NumpySortCustomOp:plain",
        "custom_op_db:NumpyViewCopyCustomOp:plain",
        "module_db:nn.BatchNorm2d:eval",
        "custom_op_db:NumpyTakeCustomOp:plain",
        "op_db:nn.functional.gelu:bf16",
    ),
)
