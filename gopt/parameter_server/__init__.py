"""A training step shared out between trainers, which compute gradients, and servers, which own states and update them.

``slicing`` cuts tensors into pieces, ``placement`` gives each piece a server and follows the user's ``server_map``,
``roles`` says which rank is what.
"""
