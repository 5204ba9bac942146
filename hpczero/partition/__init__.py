"""Parameters: how they are cut, gathered, reduced and updated.

[Note: the tensors of a bucket]
Parameters that travel together lie in one flat run of elements, each starting at a multiple of 64
and the run padded to a multiple of 64 * N. Of this run a Bucket keeps
- `full`: all of it, in the compute dtype. The parameters are views of it. Where parameters are
  sharded its storage is empty (`resize_(0)`) between uses, unless the bucket is persistent.
- `shard`: this rank's interval of `full`: an own tensor where parameters are sharded, else a view.
- `grads`: the reduced gradient (and, where gradients aren't sharded, the local accumulator).
- `master`: the float32 weights that the optimizer updates; the parameters themselves where those
  are float32 already.
- a slot: memory lent by the arena for one backward's local gradients of a sharded bucket.

[Note: two orders]
Gathers follow the order in which modules run. Reductions follow one fixed order, the reverse of the
layout: a bucket whose gradients are in waits for those before it. Both orders are functions of the
model and of what ran, never of time, so that all ranks post alike.

[Note: late gradients]
A bucket is closed, and its reduction posted, when all its gradients are in or when backward moved
on. Reentrant checkpointing of shared weights may bring another gradient afterwards: it is kept
apart, the step exchange tells all ranks, and they reduce it before the update. So closing early is
a guess about time, never about values.
"""
