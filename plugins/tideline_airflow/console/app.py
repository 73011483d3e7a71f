"""The pages as one application, which Airflow's API server serves below `/tideline`."""

from fastapi import FastAPI

from tideline_airflow.console import slices, streams

app = FastAPI(title="Tideline", docs_url=None, redoc_url=None, openapi_url=None)
app.include_router(streams.router)
app.include_router(slices.router)
