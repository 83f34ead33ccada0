"""The workers: one engine of one stage per process, behind one HTTP contract."""
