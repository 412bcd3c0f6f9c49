# The server of `dropbayes serve`, for the folder `model` in a folder mounted at /models. The parent is mounted, since a
# fit replaces the model's folder, and a mount of the folder itself would keep the old one:
#   docker build -t dropbayes .
#   docker run --rm -p 127.0.0.1:8000:8000 -v "$PWD/models:/models:ro" dropbayes
FROM python:3.12-slim@sha256:78387bc3881b8273120a12ebe6c1ab22b018ccc2c9adf565ae1ac9b536e184ea AS build
# The default torch brings gigabytes of CUDA, which a server on CPUs does not need: the build argument PIP_OPTIONS takes
# the options with which pip finds a build for CPUs. Every other file must have the hash that is written down for it.
ARG PIP_OPTIONS=""
WORKDIR /source
COPY pyproject.toml README.md LICENSE constraints.txt requirements-image.txt requirements-torch.txt ./
COPY src ./src
ENV PATH=/opt/dropbayes/bin:$PATH PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/dropbayes \
 && pip install --no-deps --require-hashes --requirement requirements-image.txt \
 && if [ -z "$PIP_OPTIONS" ]; then pip install --no-deps --require-hashes --requirement requirements-torch.txt; \
    else pip install --constraint constraints.txt $PIP_OPTIONS torch; fi \
 && pip install --no-deps --no-build-isolation . \
 && pip check

FROM python:3.12-slim@sha256:78387bc3881b8273120a12ebe6c1ab22b018ccc2c9adf565ae1ac9b536e184ea
COPY --from=build /opt/dropbayes /opt/dropbayes
RUN useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin dropbayes
USER 10001
ENV PATH=/opt/dropbayes/bin:$PATH PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1
EXPOSE 8000
HEALTHCHECK --interval=15s --timeout=3s --start-period=60s \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/v2/health/ready', timeout=2)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["dropbayes", "serve", "/models/model", "--host", "0.0.0.0", "--port", "8000"]
