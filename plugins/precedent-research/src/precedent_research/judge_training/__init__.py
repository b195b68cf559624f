"""Trains a judge for `lossy_judge` (AutoJudge 2504.20039): which of the draft's tokens may stand though rejected.

`judge_training.JudgeTraining` does it from beginning to end (`precedent train-judge`): the target serves recorded agent
runs anew, every token at which the draft disagrees is put in, the run goes on from there, and the label says whether
its outcome changed. `fitting` learns from the labels.
"""
