"""Drafters that others have published: their files, recognised by content, and their conventions, converted.

    source.py        a folder: configuration and headers of the weights
    recognise.py     which format it is, or why it is none that can be read
    keys.py          settings that stand in one of several places
    body.py          the Qwen3 body that all of them share
    layout.py        names and shapes of tensors, and `BlockParams` from and to them
    vocabulary.py    d2t, t2d
    copies.py        embedding and head of the target, which some files hold once more
    zlab.py ...      one format each: what its keys mean, and how it is written
    convert.py       reading and writing whole folders

What differs between formats (drafters.md 1.2, 1.5, 8):

    format       taps are named by     rows of the block                       vocabulary
    zlab         block, from 0         infill                                  the target's
    deepspec     block; -1 embedding   from the anchor                         the target's
    speculators  hidden state (H[0] is the embedding)   `sample_from_anchor`   a part: d2t, t2d
    specforge    block, from 0         from the anchor, or by `shift_label`    a part: d2t, t2d
    angelslim    block, from 0         infill                                  the target's
    angelspec    block, from 0         infill; DSpark from the anchor          the target's
"""
