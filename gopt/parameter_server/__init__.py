"""A training step shared out between trainers, which compute gradients, and servers, which own states and update them.

``slicing`` cuts tensors into pieces, ``placement`` gives each piece a server and follows the user's ``server_map``,
``roles`` says which rank is what. ``table_planner`` chooses for each table of rows how servers share it, and ``tables``
says where a row is.
"""
