"""Texts for people: names made safe to show, suggestions of near names, tables in notebooks."""
