#include "server/service/credentials.h"

#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "server/service/small_file.h"

namespace sparsegdn::service {
namespace {

absl::StatusOr<std::string> ReadPem(const std::string& path, const char* flag) {
  absl::StatusOr<std::string> text = ReadSmallFile(path);
  if (!text.ok()) {
    return absl::InvalidArgumentError(absl::StrCat(
        flag, " = ", path, ", wanted a PEM file: ", std::string(text.status().message())));
  }
  if (text->find("-----BEGIN") == std::string::npos) {
    return absl::InvalidArgumentError(absl::StrCat(flag, " = ", path, ", wanted a PEM file"));
  }
  return text;
}

template <typename T, void (*Free)(T*)>
struct Freed {
  T* p;
  ~Freed() { Free(p); }
};
void FreeBio(BIO* bio) { BIO_free(bio); }

// The first certificate of the chain is the server's own.
absl::Status CheckPair(const ServerConfig& config, const std::string& cert,
                       const std::string& key) {
  const Freed<BIO, FreeBio> cert_bio{BIO_new_mem_buf(cert.data(), int(cert.size()))};
  const Freed<BIO, FreeBio> key_bio{BIO_new_mem_buf(key.data(), int(key.size()))};
  const Freed<X509, X509_free> x509{PEM_read_bio_X509(cert_bio.p, nullptr, nullptr, nullptr)};
  // An empty password: an encrypted key must not ask on the terminal.
  const Freed<EVP_PKEY, EVP_PKEY_free> pkey{
      PEM_read_bio_PrivateKey(key_bio.p, nullptr, nullptr, const_cast<char*>(""))};
  absl::Status status;
  if (x509.p == nullptr) {
    status = absl::InvalidArgumentError(
        absl::StrCat("--tls-cert = ", config.tls_cert, ", wanted a PEM certificate"));
  } else if (pkey.p == nullptr) {
    status = absl::InvalidArgumentError(
        absl::StrCat("--tls-key = ", config.tls_key, ", wanted a PEM private key, not encrypted"));
  } else if (X509_check_private_key(x509.p, pkey.p) != 1) {
    status = absl::InvalidArgumentError(absl::StrCat(
        "--tls-key = ", config.tls_key, " is not the key of --tls-cert = ", config.tls_cert,
        ": cannot listen with this certificate and key"));
  } else if (X509_cmp_current_time(X509_get0_notAfter(x509.p)) < 0) {
    status =
        absl::InvalidArgumentError(absl::StrCat("--tls-cert = ", config.tls_cert, " has expired"));
  }
  ERR_clear_error();
  return status;
}

}  // namespace

absl::Status CheckTlsFiles(const ServerConfig& config) {
  if (config.tls_cert.empty()) return absl::OkStatus();
  absl::StatusOr<std::string> cert = ReadPem(config.tls_cert, "--tls-cert");
  if (!cert.ok()) return cert.status();
  absl::StatusOr<std::string> key = ReadPem(config.tls_key, "--tls-key");
  if (!key.ok()) return key.status();
  if (!config.tls_client_ca.empty()) {
    absl::StatusOr<std::string> ca = ReadPem(config.tls_client_ca, "--tls-client-ca");
    if (!ca.ok()) return ca.status();
  }
  return CheckPair(config, *cert, *key);
}

absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> MakeCredentials(
    const ServerConfig& config) {
  if (config.tls_cert.empty()) return grpc::InsecureServerCredentials();
  if (absl::Status status = CheckTlsFiles(config); !status.ok()) return status;
  using grpc::experimental::FileWatcherCertificateProvider;
  const auto refresh = static_cast<unsigned>(config.auth_refresh_seconds);
  const bool mutual = !config.tls_client_ca.empty();
  auto provider = std::make_shared<FileWatcherCertificateProvider>(
      config.tls_key, config.tls_cert, mutual ? config.tls_client_ca : "", refresh);
  grpc::experimental::TlsServerCredentialsOptions options(provider);
  options.watch_identity_key_cert_pairs();
  if (mutual) options.watch_root_certs();
  options.set_cert_request_type(mutual ? GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY
                                       : GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE);
  return grpc::experimental::TlsServerCredentials(options);
}

}  // namespace sparsegdn::service
