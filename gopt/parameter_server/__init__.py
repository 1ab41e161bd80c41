"""A training step shared out between trainers, which compute gradients, and servers, which own states and update them.

``slicing`` cuts tensors into pieces, ``placement`` gives each piece a server and follows the user's ``server_map``,
``roles`` says which rank is what. ``table_choice`` finds the tables of a step, ``table_planner`` chooses for each how
servers share it, ``tables`` says where a row is, ``lazy_rows`` updates touched rows alone, and ``row_init`` makes rows
from a seed.
"""
