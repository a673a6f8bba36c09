"""Checkpoints as directories that any layout can load; torch only.

A checkpoint is a directory of torch's distributed checkpoint format: every rank writes its shards of
parameters and of the optimizers' tensors, under the names of the one-process model. ``meta.pt`` holds
the rest of Lightning's checkpoint, and of the optimizers, as plain containers; ``checksums`` what all
of it must be. It is written aside and published by one rename, so a checkpoint that can be seen is whole.

==============  =====================================================================
``directory``   write and read a whole checkpoint with all ranks
``background``  writing while the training goes on
``files``       places, local and remote: written aside, published, linked, removed
``storage``     torch's writer and reader, with a checksum of each tensor
``contents``    what isn't tensors: plain containers, read without running code
``ranks``       ranks that fail together
``state``       what is said of parameters, optimizers and loaders
``names``       names of the one-process model where stages hold parts of it
``reader``      from the directory into laid-out modules and optimizers
``weights``     the weights alone, one at a time; one plain file of a directory
``latest``      the newest checkpoint below a folder
==============  =====================================================================
"""
