"""Read trace entries as columns straight from a pickle's opcodes, without an object for each entry.

Nearly all entries of a snapshot are the same few opcodes with other arguments. `layout.py` knows the bytes of
such an entry, `scan.py` finds and decodes runs of them, and `rest.py` gives what remains to the safe reader,
with one object in place of each run. What does not fit exactly is read by the safe reader alone: docs/design/
columns_from_pickle.md says what is proven, and how.
"""
