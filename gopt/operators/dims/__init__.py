"""Dimensions of an operator's operands and results that are split together: one rule for each family.

A *dim factor* is an index of an operator: a dimension of some operands, and of the results, or summed away. To split an
operator is to split an index: each member computes a part of the index with the operator itself. Factors are read in
both directions, from operands to results and back. Types are logical: types of whole values. Members compute an
operator without a rule whole.
"""
