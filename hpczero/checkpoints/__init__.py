"""Checkpoints in HDF5: saved by any number of ranks, loaded by any other.

[Note: a checkpoint folder]
    <dir>/latest                          the tag of the newest checkpoint
    <dir>/global_step100/manifest.json    what was saved, by name; sizes and checksums of the files
    <dir>/global_step100/index.h5         every tensor under its name at its full shape (virtual)
    <dir>/global_step100/rank_00000.h5    flat runs of what rank 0 owned, and its random state

A tensor's `kind` is what it is to its parameter: "weights" (float32 masters; frozen parameters in
their own dtype), or the optimizer's name of a state ("exp_avg", "momentum_buffer", ...). Dataset
`<kind>/<bucket>` of rank r holds elements [r * shard, (r + 1) * shard) of the bucket's flat run, in
which the manifest places each parameter. Names decide at loading, never ranks.

With layout="shared" there is one shared.h5 instead of the ranks' files; what would be a file of
rank r is its group rank_0000r. All ranks make it through HDF5 together, then each writes its bytes
beside HDF5, as into a file of its own; rank 0 adds the one table of checksums.

Nothing is pickled: loading a checkpoint never executes code.
"""
