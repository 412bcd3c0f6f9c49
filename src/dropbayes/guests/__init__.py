"""dropbayes as a guest in other frameworks: their own procedures under draws, and what a network hides from them."""

from dropbayes.guests.diagnosis import Diagnosis, Finding, doctor
from dropbayes.guests.procedures import each_draw, one_draw, predict_through

__all__ = ["Diagnosis", "Finding", "doctor", "each_draw", "one_draw", "predict_through"]
