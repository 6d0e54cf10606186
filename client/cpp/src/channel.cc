#include "src/channel.h"

#include <arpa/inet.h>
#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <sstream>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "src/errors.h"
#include "src/targets.h"

namespace sparsegdn::client {
namespace {

constexpr unsigned kRefreshSeconds = 10;
constexpr size_t kMaxTokenBytes = 512;

absl::Status Wrong(const std::string& field, const std::string& message) {
  return MakeError(absl::StatusCode::kInvalidArgument, "BAD_OPTION", field, message);
}

// Whether what is sent stays on this machine, whichever server of a list it goes to.
bool IsLocal(const std::string& target) {
  if (absl::StartsWith(target, "unix:")) return true;
  std::string rest = target;
  for (const char* scheme : {"dns:///", "dns:", "ipv4:", "ipv6:"}) {
    if (absl::StartsWith(rest, scheme)) rest = rest.substr(std::string(scheme).size());
  }
  const std::vector<std::string> items = absl::StrSplit(rest, ',');
  return std::all_of(items.begin(), items.end(), [](const std::string& item) {
    const std::string host = item.substr(0, item.rfind(':'));
    in_addr v4;  // parsed: 127.0.0.1.example.com is a name like any other
    const bool loopback = absl::StartsWith(host, "127.") && inet_pton(AF_INET, host.c_str(), &v4);
    return loopback || host == "localhost" || host == "[::1]" || item == "[::1]";
  });
}

absl::Status CheckReadable(const std::string& path) {
  if (path.empty() || access(path.c_str(), R_OK) == 0) return absl::OkStatus();
  return FileError("read", path, errno);
}

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> Credentials(
    const ConnectOptions& options) {
  if (options.credentials != nullptr) return options.credentials;
  if (!options.tls.enabled()) return grpc::InsecureChannelCredentials();
  const TlsOptions& tls = options.tls;
  if (tls.cert_file.empty() != tls.key_file.empty()) {
    return Wrong("tls", "a client certificate and its key must be given together");
  }
  for (const std::string* path : {&tls.ca_file, &tls.cert_file, &tls.key_file}) {
    if (absl::Status status = CheckReadable(*path); !status.ok()) return status;
  }
  if (tls.ca_file.empty() && tls.cert_file.empty()) return grpc::SslCredentials({});
  // The files are looked at again every few seconds: a worker outlives its certificate.
  using grpc::experimental::FileWatcherCertificateProvider;
  grpc::experimental::TlsChannelCredentialsOptions watched;
  watched.set_certificate_provider(std::make_shared<FileWatcherCertificateProvider>(
      tls.key_file, tls.cert_file, tls.ca_file, kRefreshSeconds));
  if (!tls.ca_file.empty()) watched.watch_root_certs();
  if (!tls.cert_file.empty()) watched.watch_identity_key_cert_pairs();
  return grpc::experimental::TlsCredentials(watched);
}

absl::Status CheckOptions(const ConnectOptions& options) {
  if (options.target.empty()) {
    return MakeError(absl::StatusCode::kInvalidArgument, "TARGET_EMPTY", "target",
                     "target is empty, wanted host:port or a gRPC URI");
  }
  if (options.max_attempts < 1 || options.max_attempts > 5) {
    return MakeError(absl::StatusCode::kInvalidArgument, "MAX_ATTEMPTS", "max_attempts",
                     absl::StrCat("max_attempts is ", options.max_attempts, ", wanted 1 to 5"));
  }
  if (options.token_file.empty()) return absl::OkStatus();
  const bool safe = options.credentials != nullptr || options.tls.enabled() ||
                    options.allow_plain_text_token || IsLocal(options.target);
  if (!safe) {
    return Wrong("token_file",
                 absl::StrCat("a bearer token would travel in clear text to ", options.target,
                              ": turn on TLS, or allow it in so many words"));
  }
  return ReadToken(options.token_file).status();
}

}  // namespace

absl::StatusOr<std::string> ReadToken(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return FileError("read", path, errno);
  std::string text(kMaxTokenBytes + 256, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(file.gcount()));
  const std::string token(absl::StripAsciiWhitespace(text));
  for (const char c : token) {
    if (c < 0x21 || c > 0x7e) {
      return MakeError(absl::StatusCode::kInvalidArgument, "TOKEN_FILE", "token_file",
                       absl::StrCat(path, ": wanted one token of printable characters"));
    }
  }
  if (token.empty() || token.size() > kMaxTokenBytes) {
    return MakeError(absl::StatusCode::kInvalidArgument, "TOKEN_FILE", "token_file",
                     absl::StrCat(path, ": wanted one token of 1 .. ", kMaxTokenBytes, " bytes"));
  }
  return token;
}

absl::Status ExplainTls(absl::Status status, bool uses_tls) {
  if (!uses_tls || status.code() != absl::StatusCode::kUnavailable) return status;
  const std::string message(status.message());
  const auto says = [&](const char* words) { return message.find(words) != std::string::npos; };
  // In TLS 1.3 a server looks at the client's certificate after the client's part is done: all that
  // the client sees of a refusal is a connection that closes before it was of any use.
  const bool closed_at_once =
      says("last error") && (says("Socket closed") || says("reset by peer"));
  if (closed_at_once || says("SSL_ERROR") || says("andshake") || says("ertificate")) {
    return MakeError(absl::StatusCode::kUnauthenticated, "TLS_HANDSHAKE", "",
                     absl::StrCat("the TLS handshake failed: one side does not accept the other's "
                                  "certificate, or has none: ",
                                  message));
  }
  return status;
}

absl::StatusOr<std::shared_ptr<grpc::Channel>> MakeChannel(const ConnectOptions& options) {
  if (absl::Status status = CheckOptions(options); !status.ok()) return status;
  absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> credentials = Credentials(options);
  if (!credentials.ok()) return credentials.status();
  absl::StatusOr<std::string> uri = TargetUri(options.target);
  if (!uri.ok()) return uri.status();
  grpc::ChannelArguments arguments;
  const std::string service_config = ServiceConfig(*uri, options.max_attempts);
  if (!service_config.empty()) arguments.SetServiceConfigJSON(service_config);
  arguments.SetLoadBalancingPolicyName("round_robin");
  arguments.SetMaxReceiveMessageSize(options.max_receive_message_bytes);
  arguments.SetInt("grpc.per_rpc_retry_buffer_size", static_cast<int>(options.retry_buffer_bytes));
  // A server that starts is found within seconds; gRPC would wait for up to two minutes.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 200);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 2000);
  if (!options.tls.server_name.empty()) {
    arguments.SetSslTargetNameOverride(options.tls.server_name);
  }
  return grpc::CreateCustomChannel(*uri, *credentials, arguments);
}

}  // namespace sparsegdn::client
