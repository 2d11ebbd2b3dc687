"""Proposers, which decide what to try next, and their models.

How to read the search, from the data to the proposal:

    axes, space          knobs as axes, and axes as a unit cube
    points, collect      what a study has measured, by point, read from the ledger
    curves, observations values of finished and stopped runs, as a model is fitted to them
    gp, objective_model  the Gaussian process, and the posterior of the objective
    fitting, acquisition the models of a study, and the points with the largest expected improvement
    sampling, auto,      samplers: draws without a model, the default, and Optuna's
    optuna_models
    search, belief       the proposer, and what it believes
    rungs, fidelity,     fewer epochs: stopped and continued runs, and populations
    fidelity_model, pbt
"""
