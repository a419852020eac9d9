"""Data sets: the two samples that the package makes itself, and those that a config names.

Modules, in the direction of the data: `coco_format` (writes a set once, registers it lazily), `shapes` and `nuclei`
(the samples), `readers` (annotation files), `specs` (entries of DATASETS.REGISTER), `register` (what a cfg needs before its
data sets are used), `position` (where a training loader stands).
Importing this package imports none of them and registers nothing.
"""
