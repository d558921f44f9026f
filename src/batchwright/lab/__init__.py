"""Compare batch-size strategies over several data sets and models. Needs torch and scikit-learn."""
