"""Checks a certificate of ``gopt prove`` without the prover: ``algebra`` tells equal values, ``values`` and ``nodes``
are the rules of nodes, ``calls`` of collectives, ``check`` reads the lines beside a folder."""
