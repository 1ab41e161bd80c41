"""Splits a training step between trainers, which compute gradients, and servers, which own states and update them.

``slicing`` cuts tensors into pieces; ``placement`` assigns each piece to a server and follows the user's
``server_map``; ``roles`` maps ranks to roles. ``table_choice`` finds the tables of a step, ``table_planner`` chooses a
layout for each, ``tables`` locates rows, ``lazy_rows`` updates only touched rows, and ``row_init`` makes rows from a
seed.
"""
