"""The accuracy study: networks x batch sizes x threads x predictors, each held against fresh processes of the same step.

``cases.py`` is the data, ``scoring.py`` the arithmetic, ``archive.py`` keeps what was measured, ``ablation.py`` leaves terms of a prediction out,
``single_ops.py`` holds single random ops against their curves, ``peers.py`` what other tools say, ``page.py``, ``tables.py`` and ``figures.py``
write it down. Measuring itself belongs to the command (:mod:`dlperf.commands.validation`): everything here works on data and is tested without a clock.
"""
