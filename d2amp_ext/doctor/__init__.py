"""The room of the doctor: what is installed, what the machine can do, and the command that mends what is wrong.

Needs only the standard library. torch and whatever else may be broken is imported in processes of their own.
"""
