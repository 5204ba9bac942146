"""Memory and ranks: who takes part, and how flat tensors travel between them.

[Note: couriers]
All MPI traffic of a World is carried by two Couriers, each one thread with its own duplicate of the
communicator and a first-in first-out queue: `gathers` brings parameters, `reductions` takes
gradients away. Two, so that gathers and reductions need not interleave alike on all ranks; one
thread per communicator, since two threads on one give silently wrong sums. Before any data moves
the ranks compare the signatures of what they are about to do: disagreement is an exception on all
ranks, never a hang and never a wrong sum. A rank blocks on the reductions only after a meeting
among the gathers: so ranks that want different things always find each other in the same queue. New
weights that cross between nodes under the next forward go by `reductions` too, and need no meeting
before anybody waits for them: all ranks have posted them at the end of the same step.
"""
