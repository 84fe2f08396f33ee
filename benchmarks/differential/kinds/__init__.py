"""Models and cases by kind."""
