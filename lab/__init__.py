"""The lab: experiments, measurements, plans, traces and training; the product never imports it."""
