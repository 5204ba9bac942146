"""Where model states are kept: in memory, or in a file with a place in memory to work in.

[Note: a place for each array]
An array in a file has a place in memory that is its own for ever: as long as the array, but without
pages except for what is read, being used, or not yet written. So whoever has a tensor of it, an
optimizer's state say, need not be told when it comes and goes; nothing is copied between a pool of
buffers and a tensor; and bytes go between the place and the disk directly, where the file system
can do that. Who uses a part reads it first, and afterwards writes it or drops it, which gives its
pages back. What is there without having been read is zero or stale.

[Note: parts]
A part that is read, written or dropped begins where a page does, and ends where one does or at the
end of the array: a page belongs to one part. Whoever cuts in multiples of CUT elements is right for
every dtype.
"""
