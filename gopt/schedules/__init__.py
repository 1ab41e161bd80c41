"""Schedules of pipeline stages: the order in which members of axis ``pp`` run forwards and backwards."""
